from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from client.training.private import step as stepping
from client.training.private.losses import Loss, Precision
from client.training.private.mechanism import Mechanism, Terms
from client.training.private.plan import EngineName, Plan, choose
from client.training.private.probe import Example
from client.training.private.step import PrivateSteps
from federation.errors import LocalProtocolError
from privacy.differential_privacy.sampling import poisson_sample
from privacy.differential_privacy.table import I64

Fixed = Callable[[str], Callable[[int], bytes]]
CLIP, N_PUB = 1.5, 500


@pytest.fixture(autouse=True)
def _quick_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's trial is tested elsewhere."""
    monkeypatch.setattr(Mechanism, "tested", lambda self, _draw: self)


def perceptron() -> nn.Sequential:
    """The same small model each time."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def records(count: int) -> tuple[Tensor, Tensor]:
    """The same records each time."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def plan_of(rows: int = 16, engine: EngineName = EngineName.ONE_BACKWARD) -> Plan:
    """A plan for the perceptron."""
    return Plan(engine, rows, 400, 51, "test")


def terms(rate: float = 0.2, path: str = "dither", z: float = 1.0) -> Terms:
    """Terms of small steps."""
    return Terms(CLIP, rate, N_PUB, z, epsilon=3.0, delta=1e-5, steps=10, path=path)  # type: ignore[arg-type]  # one of two


def private(module: nn.Module, loss: Loss, draw: Callable[[int], bytes], **changes: Any) -> PrivateSteps:
    """Steps of the perceptron, from fixed bytes."""
    precision, plan = changes.pop("precision", None), changes.pop("plan", plan_of())
    return PrivateSteps(module, loss, plan, terms(**changes).mechanism(plan), precision=precision, draw=draw)


class Silent:
    """A noise share of zeros, to see what the noise is added to."""

    def noised(self, parts: Any, ring: int) -> Any:
        """The parts as words."""
        return (part.astype(f"<u{ring // 8}") for part in parts)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without noise."""
    monkeypatch.setattr("privacy.differential_privacy.sampler.Sampler.share", lambda _self, _draw: Silent())


def flat(module: nn.Module) -> Tensor:
    """The gradients that a step left."""
    return torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])


def expected_mean(module: nn.Module, loss: Loss, chosen: I64, inputs: Tensor, labels: Tensor, rate: float) -> Tensor:
    """The clipped sum of single records' gradients, by autograd, over rate * N_pub."""
    total = torch.zeros(51, dtype=torch.float64)
    for row in chosen.tolist():
        value = loss(module(inputs[row : row + 1]), labels[row : row + 1]).sum()
        gradient = torch.cat(
            [each.flatten() for each in torch.autograd.grad(value, list(module.parameters()))]
        ).double()
        total += gradient * min(1.0, CLIP / float(gradient.norm()))
    return (total / (rate * N_PUB)).float()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("path", ["dither", "exact"])
@pytest.mark.parametrize("engine", list(EngineName))
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_without_noise_a_step_is_the_clipped_mean_over_a_public_number(
    path: str, engine: EngineName, scale: float, fixed: Fixed, cross_entropy: Loss
) -> None:
    """Physical batches, padding, scale, engine and path change nothing; the denominator is rate * N_pub."""
    module, (inputs, labels) = perceptron(), records(150)
    steps = private(
        module, cross_entropy, fixed("one"), plan=plan_of(16, engine), path=path, precision=Precision(scale=scale)
    )

    assert steps.take(inputs, labels)

    chosen = poisson_sample(150, 0.2, fixed("one"))
    assert 16 < len(chosen) < 48
    expected = expected_mean(module, cross_entropy, chosen, inputs, labels, 0.2)
    assert torch.allclose(flat(module), expected, atol=2 * 2**-16 * CLIP / 100)


@pytest.mark.parametrize("path", ["dither", "exact"])
def test_noise_is_the_operating_systems_whatever_torch_is_seeded_with(path: str, cross_entropy: Loss) -> None:
    """The same seeds of torch and numpy give different gradients, and their generators are left as they were."""
    module, (inputs, labels) = perceptron(), records(40)
    plan = plan_of()
    steps = PrivateSteps(module, cross_entropy, plan, terms(1.0, path).mechanism(plan))
    seen = []
    for _ in range(2):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002 - the seedable generator that must decide nothing
        steps.take(inputs, labels)
        seen.append(flat(module).clone())
        assert torch.rand(1).item() == pytest.approx(0.7576315999031067)

    assert not torch.equal(*seen)
    assert float((seen[0] - seen[1]).std()) == pytest.approx(CLIP / N_PUB * 2**0.5, rel=0.5)


@pytest.mark.parametrize("path", ["dither", "exact"])
@pytest.mark.parametrize(("count", "rate"), [(0, 0.2), (3, 1e-9)])
def test_an_empty_batch_is_a_step_of_noise(
    count: int, rate: float, path: str, fixed: Fixed, cross_entropy: Loss
) -> None:
    """No records, or none drawn, give noise like any other step, and every parameter has a gradient."""
    module, (inputs, labels) = perceptron(), records(count)

    assert private(module, cross_entropy, fixed("empty"), rate=rate, path=path).take(inputs, labels)

    assert all(each.grad is not None for each in module.parameters())
    assert float(flat(module).std()) * rate * N_PUB == pytest.approx(CLIP, rel=0.4)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("path", ["dither", "exact"])
@pytest.mark.parametrize("engine", list(EngineName))
def test_a_record_that_is_not_finite_is_dropped_and_nobody_is_told(
    path: str, engine: EngineName, fixed: Fixed, cross_entropy: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    """Infinity in one record leaves the others' mean as it is: not the whole sum, not the step, not the log."""
    module, (inputs, labels) = perceptron(), records(30)
    chosen = poisson_sample(30, 0.5, fixed("inf"))
    inputs[chosen[2]] = torch.inf
    inputs[chosen[5], 0] = torch.nan

    assert private(module, cross_entropy, fixed("inf"), rate=0.5, path=path, plan=plan_of(16, engine)).take(
        inputs, labels
    )

    rest = np.delete(chosen, [2, 5])
    expected = expected_mean(module, cross_entropy, rest, inputs, labels, 0.5)
    assert torch.allclose(flat(module), expected, atol=2 * 2**-16 * CLIP / 250)
    assert not caplog.records


@pytest.mark.parametrize("path", ["dither", "exact"])
def test_one_record_moves_the_integers_by_at_most_d(
    path: str, fixed: Fixed, cross_entropy: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same dither, adding one record of any size moves the integers before the noise within D."""
    parts: list[I64] = []

    class Kept(Silent):
        def noised(self, given: Any, ring: int) -> Any:
            """Keeps the integers that noise would be added to."""
            listed = [part.copy() for part in given]
            parts.append(np.concatenate(listed))
            return super().noised(listed, ring)

    monkeypatch.setattr("privacy.differential_privacy.sampler.Sampler.share", lambda _self, _draw: Kept())
    module, (inputs, labels) = perceptron(), records(60)
    inputs[0] *= 1e4
    for number in (0, 31, 59):
        rest = np.delete(np.arange(60), number)
        steps = []
        for places in (np.arange(60), rest):
            steps.append(private(module, cross_entropy, fixed("same"), rate=1.0, path=path))
            steps[-1].take(inputs[places], labels[places])
        moved = parts[-2] - parts[-1]
        squared = steps[0]._mechanism.grid.squared
        assert 0 < int(moved @ moved) <= squared


@pytest.mark.parametrize("path", ["dither", "exact"])
def test_a_cancelled_step_leaves_nothing(path: str, fixed: Fixed, cross_entropy: Loss) -> None:
    """Cancelled between physical batches, a step changes no gradient, and computes no further."""
    module, (inputs, labels) = perceptron(), records(60)
    asked = iter([False, False, True])

    assert not private(module, cross_entropy, fixed("stop"), rate=1.0, path=path).take(
        inputs, labels, lambda: next(asked)
    )

    assert all(each.grad is None for each in module.parameters())
    assert next(asked, None) is None


def test_a_cancelled_batch_is_in_no_later_step(fixed: Fixed, cross_entropy: Loss) -> None:
    """The records of a cancelled step's first physical batches are forgotten."""
    module, (inputs, labels) = perceptron(), records(60)
    steps = private(module, cross_entropy, fixed("stop"), rate=1.0)
    asked = iter([False, True])
    totals: list[np.ndarray] = []
    object.__setattr__(steps, "_mechanism", _Spy(steps._mechanism, totals))

    assert not steps.take(inputs, labels, lambda: next(asked))
    assert steps.take(inputs, labels)

    (total,) = totals
    expected = expected_mean(module, cross_entropy, np.arange(60), inputs, labels, 1.0)
    assert np.allclose(total / N_PUB, expected, atol=1e-7)


class _Spy:
    """A mechanism that keeps the sum and adds nothing."""

    def __init__(self, mechanism: Mechanism, totals: list[np.ndarray]) -> None:
        self.terms, self._totals = mechanism.terms, totals

    def mean(self, total: np.ndarray, out: np.ndarray, _draw: object) -> None:
        """Keeps the sum."""
        self._totals.append(total.copy())
        out[:] = 0


def test_dropout_depends_on_no_seed_and_no_number_of_batches(fixed: Fixed, cross_entropy: Loss) -> None:
    """Each step seeds dropout from the operating system: torch's seed decides nothing, and is left as it was."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    inputs, labels = records(40)
    totals: list[np.ndarray] = []
    for label in ("a", "b", "a"):
        steps = private(module, cross_entropy, fixed(label), rate=1.0)
        object.__setattr__(steps, "_mechanism", _Spy(steps._mechanism, totals))
        torch.manual_seed(9)
        steps.take(inputs, labels)

    assert not np.array_equal(totals[0], totals[1])
    assert np.array_equal(totals[0], totals[2])


def test_more_records_than_planned_are_summed_in_smaller_chunks(
    fixed: Fixed, cross_entropy: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch larger than the plan's `most` is not cut short; its chunks shrink so that gamma holds."""
    made: list[int] = []
    real = stepping.Total
    monkeypatch.setattr(
        stepping, "Total", lambda shapes, chunk, device: made.append(chunk) or real(shapes, chunk, device)
    )
    module, (inputs, labels) = perceptron(), records(90)
    steps = private(module, cross_entropy, fixed("many"), rate=1.0, plan=replace(plan_of(), most=30))
    totals: list[np.ndarray] = []
    object.__setattr__(steps, "_mechanism", _Spy(steps._mechanism, totals))

    steps.take(inputs, labels)
    steps.take(inputs[:20], labels[:20])
    steps.take(inputs, labels)

    assert made == [21, 64]
    expected = expected_mean(module, cross_entropy, np.arange(90), inputs, labels, 1.0)
    assert np.allclose(totals[0] / N_PUB, expected, atol=1e-7)
    assert np.array_equal(totals[0], totals[2])


def test_physical_batches_are_filled_up(fixed: Fixed, cross_entropy: Loss) -> None:
    """The last physical batch is filled up with zeros to a multiple of sixteen: no shape shows how many were drawn."""
    shapes = []

    class Seeing(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            """Notes the shape, and how many rows hold something."""
            shapes.append((tuple(values.shape), int(values.any(1).sum())))
            return values

    module = nn.Sequential(Seeing(), *perceptron())
    for rows in (48, 24):
        private(module, cross_entropy, fixed("shape"), rate=1.0, plan=plan_of(rows)).take(*records(53))

    assert shapes == [((48, 4), 48), ((16, 4), 5), ((24, 4), 24), ((24, 4), 24), ((16, 4), 5)]


def test_an_optimiser_of_torch_trains_with_it(cross_entropy: Loss) -> None:
    """Steps and a plain optimiser find a good model where there are many records and little noise."""
    torch.manual_seed(3)
    inputs = torch.randn(2000, 4)
    labels = inputs[:, :3].argmax(1)
    module = perceptron()
    plan = choose(module, cross_entropy, Example(inputs[:4], labels[:4]), expected=400)
    terms = Terms(1.0, 0.2, 2000, 1.0, epsilon=8.0, delta=1e-5, steps=60)
    steps = PrivateSteps(module, cross_entropy, plan, terms.mechanism(plan))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)

    for _ in range(60):
        assert steps.take(inputs, labels)
        optimiser.step()

    assert float((module(inputs).argmax(1) == labels).float().mean()) > 0.85


def test_a_plan_of_another_model_is_refused(cross_entropy: Loss) -> None:
    """A plan's noise is for its number of parameters."""
    plan = replace(plan_of(), values=52)

    with pytest.raises(LocalProtocolError, match="plan for 52 parameters was used for a model of 51"):
        PrivateSteps(perceptron(), cross_entropy, plan, terms().mechanism(plan))


# ------------------------------------------------------------------------------------------ faults found in Opacus 1.6


@pytest.mark.usefixtures("silent")
def test_a_dynamic_scaler_has_no_place(fixed: Fixed, cross_entropy: Loss) -> None:
    """Opacus with GradScaler leaves a gradient of exactly zero; a static scale leaves the same gradient as none."""
    module, (inputs, labels) = perceptron(), records(60)
    found = []
    for scale in (1.0, 65536.0):
        private(module, cross_entropy, fixed("scale"), precision=Precision(scale=scale)).take(inputs, labels)
        found.append(flat(module).clone())

    assert float(found[0].abs().max()) > 0
    assert torch.equal(*found)


def test_bf16_clips_to_c_and_not_beyond(fixed: Fixed, cross_entropy: Loss) -> None:
    """Opacus under bfloat16 autocast clips to 1.0065 C, for which its noise is too small; here C is C."""
    module, (inputs, labels) = perceptron(), records(40)
    lengths = []
    for row in range(40):
        steps = private(module, cross_entropy, fixed("bf16"), rate=1.0, precision=Precision(torch.bfloat16))
        totals: list[np.ndarray] = []
        object.__setattr__(steps, "_mechanism", _Spy(steps._mechanism, totals))
        steps.take(100 * inputs[row : row + 1], labels[row : row + 1])
        lengths.append(float(np.linalg.norm(totals[0])))

    assert CLIP * (1 - 1e-5) < max(lengths) <= CLIP


@pytest.mark.usefixtures("silent")
def test_physical_batches_add_up(fixed: Fixed, cross_entropy: Loss) -> None:
    """Accumulation with Opacus' ghost clipping is wrong by 94 %; here the physical batch's size changes nothing."""
    inputs, labels = records(120)
    found = []
    for rows in (3, 24, 120):
        module = perceptron()
        private(module, cross_entropy, fixed("rows"), plan=plan_of(rows)).take(inputs, labels)
        found.append(flat(module))

    assert torch.allclose(found[0], found[1], atol=2 * 2**-16 * CLIP / 100)
    assert torch.allclose(found[0], found[2], atol=2 * 2**-16 * CLIP / 100)


@pytest.mark.usefixtures("silent")
def test_the_realised_batch_shows_nowhere(fixed: Fixed, cross_entropy: Loss) -> None:
    """Opacus may divide by the batch that was drawn; here twice the records give twice the gradient."""
    module = perceptron()
    inputs, labels = torch.ones(1, 4), torch.ones(1, dtype=torch.long)
    found = []
    for count in (8, 16):
        private(module, cross_entropy, fixed("size"), rate=1.0).take(inputs.repeat(count, 1), labels.repeat(count))
        found.append(flat(module).clone())

    assert torch.allclose(2 * found[0], found[1], atol=4 * 2**-16 * CLIP / N_PUB)
