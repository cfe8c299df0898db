import io
import json
import sys

import pytest
import torch
from rich.console import Console

from simulations.peers import private_step

_SIDES = ["plain", "parley", "opacus_hooks", "opacus_functorch", "opacus_ghost"]


@pytest.mark.slow
def test_a_turn_of_each_side_gives_the_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Every side trains its own copy, and its cost is told in multiples of plain SGD's."""
    threads = torch.get_num_threads()

    assert private_step.main(["--json", "--models", "mlp", "--turns", "1"]) == 0

    told = capsys.readouterr()
    result = json.loads(told.out)
    assert list(result) == ["mlp"]
    assert list(result["mlp"]) == _SIDES
    assert result["mlp"]["plain"] == 1
    assert all(0 < ratio < 10_000 for ratio in result["mlp"].values())
    assert "A private step, in multiples of a plain one" in told.err
    assert "one-backward" in told.err
    assert torch.get_num_threads() == threads


def test_every_side_moves_its_own_copy() -> None:
    """A step of one side changes no other's model, nor the trial's, whose layers the engine all supports."""
    trials = private_step.trials()
    assert {name: sum(each.numel() for each in trial.module.parameters()) for name, trial in trials.items()} == {
        "mlp": 50_826,
        "cnn": 824_458,
        "transformer": 166_794,
    }
    trial = trials["mlp"]
    before = {name: each.clone() for name, each in trial.module.state_dict().items()}

    for step in (private_step._plain(trial), private_step._parley(trial)):
        step()

    assert all(torch.equal(each, before[name]) for name, each in trial.module.state_dict().items())


def test_the_table_shows_multiples_of_plain_sgd() -> None:
    """People read milliseconds of the plain step, and every other side as a multiple of it."""
    console = Console(file=io.StringIO(), width=160)

    console.print(private_step.table({"cnn": dict(zip(_SIDES, (0.2, 0.25, 0.5, 1.0, 0.4), strict=True))}))

    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    for part in ("cnn", "200.0 ms", "1.25 x", "2.50 x", "5.00 x", "2.00 x"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "rnn"], "there is no model 'rnn'. To fix (you): choose of mlp, cnn, transformer"),
        (["--turns", "0"], "0 turns measure nothing. To fix (you): ask for 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option is told, with what is there, and nothing is measured."""
    assert private_step.main(arguments) == 2

    told = capsys.readouterr()
    assert message in told.err
    assert not told.out


def test_without_opacus_the_benchmark_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The missing package is named, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "opacus", None)

    assert private_step.main(["--models", "mlp", "--turns", "1"]) == 2

    assert "Opacus cannot be measured" in capsys.readouterr().err
