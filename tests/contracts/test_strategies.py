"""What every strategy promises; a new file in `strategies/` is picked up by itself."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from federation import plugins
from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from federation.job import StrategySettings
from federation.vector import F32, F64
from privacy.secure_aggregation.plain import PlainSum
from strategies.strategy import State, SumStrategy, load

SIZE = 17


@pytest.fixture(params=plugins.names("strategies"))
def name(request: pytest.FixtureRequest) -> str:
    """Each strategy's name."""
    return str(request.param)


@pytest.fixture
def strategy(name: str) -> SumStrategy:
    """Each strategy with its defaults."""
    return load(defaults(name))


@pytest.fixture
def model() -> F32:
    """A model."""
    return np.random.default_rng(0).normal(size=SIZE).astype(np.float32)


def stored(content: bytes, offset: int, count: int) -> bytes:
    """Reads a contribution as if it lay in a file."""
    return content[offset : offset + count]


def defaults(name: str) -> StrategySettings:
    """The settings of strategy `name` with nothing chosen but the name."""
    chosen: StrategySettings = plugins.load("strategies", name).Settings(name=name)
    return chosen


def numbers(declared: type[StrategySettings]) -> set[str]:
    """The names of a strategy's numeric choices."""
    return {key for key, field in declared.model_fields.items() if field.annotation is float}


def updates(rounds: int, seed: int = 1) -> list[F64]:
    """Mean updates of some rounds."""
    return list(np.random.default_rng(seed).normal(size=(rounds, SIZE)))


def frozen(state: State) -> dict[str, bytes]:
    """A state bit for bit."""
    return {key: vector.tobytes() for key, vector in state.items()}


def thawed(stored: Mapping[str, bytes]) -> State:
    """A state from its bytes, as a store gives it back: read-only."""
    return {key: np.frombuffer(content, "<f8") for key, content in stored.items()}


def test_it_declares_itself(name: str, strategy: SumStrategy) -> None:
    """A strategy file offers Settings that bear its name, and `make` gives a strategy with a proximal weight >= 0."""
    module = plugins.load("strategies", name)
    assert issubclass(module.Settings, StrategySettings)
    assert {"Settings", "make"} <= set(module.__all__)
    assert isinstance(strategy, SumStrategy)
    assert strategy.local.proximal >= 0
    assert defaults(name).name == name


def test_shapes_and_types(strategy: SumStrategy, model: F32) -> None:
    """A step gives a float32 model of the same size, and a state of the same names: float64 vectors of that size."""
    state = strategy.initial(SIZE)
    moved, after = strategy.step(model, updates(1)[0], state)
    assert moved.shape == (SIZE,)
    assert moved.dtype == np.float32
    assert after.keys() == state.keys()
    for vector in (*state.values(), *after.values()):
        assert vector.shape == (SIZE,)
        assert vector.dtype == np.float64


def test_equal_input_gives_equal_bits(name: str, model: F32) -> None:
    """Two strategies made from one settings value take equal steps, bit for bit."""
    ends = []
    for _ in range(2):
        strategy = load(defaults(name))
        current, state = model, strategy.initial(SIZE)
        for update in updates(5):
            current, state = strategy.step(current, update, state)
        ends.append((current.tobytes(), frozen(state)))
    assert ends[0] == ends[1]


def test_a_first_update_of_zero_moves_nothing(strategy: SumStrategy, model: F32) -> None:
    """When all sites return the model as it was, the first step leaves it as it was."""
    moved, _ = strategy.step(model, np.zeros(SIZE), strategy.initial(SIZE))
    assert moved.tobytes() == model.tobytes()


def test_the_first_step_goes_where_the_update_points(strategy: SumStrategy, model: F32) -> None:
    """No coordinate moves against its first update."""
    update = updates(1)[0]
    moved, _ = strategy.step(model, update, strategy.initial(SIZE))
    assert (np.sign(moved - model) == np.sign(update)).all()


@given(cut=st.integers(0, 8), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("each", plugins.names("strategies"))
def test_a_restart_loses_nothing(each: str, cut: int, seed: int) -> None:
    """A new process that reads model and state from bytes at any round goes on bit for bit."""
    rounds = updates(8, seed)
    start = np.zeros(SIZE, np.float32)

    def run(strategy: SumStrategy, current: F32, state: State, part: list[F64]) -> tuple[F32, State]:
        for update in part:
            current, state = strategy.step(current, update, state)
        return current, state

    unbroken, final = run(load(defaults(each)), start, load(defaults(each)).initial(SIZE), rounds)
    half, state = run(load(defaults(each)), start, load(defaults(each)).initial(SIZE), rounds[:cut])
    again = np.frombuffer(half.tobytes(), "<f4")
    resumed, after = run(load(defaults(each)), again, thawed(frozen(state)), rounds[cut:])
    assert resumed.tobytes() == unbroken.tobytes()
    assert frozen(after) == frozen(final)


def test_the_inputs_stay_as_they_were(strategy: SumStrategy, model: F32) -> None:
    """A step changes neither model, update nor state, and works on read-only ones."""
    current, state = strategy.step(model, updates(1)[0], strategy.initial(SIZE))
    update = updates(2)[1]
    current.flags.writeable = update.flags.writeable = False
    for vector in state.values():
        vector.flags.writeable = False
    before = (current.tobytes(), update.tobytes(), frozen(state))
    moved, _ = strategy.step(current, update, state)
    assert (current.tobytes(), update.tobytes(), frozen(state)) == before
    assert not np.shares_memory(moved, current)


@pytest.mark.parametrize("each", plugins.names("strategies"))
@given(order=st.permutations(range(5)))
@settings(max_examples=10, deadline=None)
def test_the_order_of_the_sites_does_not_matter(each: str, order: list[int]) -> None:
    """Three rounds over the plain sum end at one model, to float32's precision, in any order of the sites."""
    rng = np.random.default_rng(5)
    rounds = [[rng.normal(size=SIZE).astype(np.float32) for _ in range(5)] for _ in range(3)]

    def end(sites: list[int]) -> F32:
        strategy = load(defaults(each))
        current, state = np.zeros(SIZE, np.float32), strategy.initial(SIZE)
        for contributions in rounds:
            total = PlainSum(SIZE, "<f4")
            for site in sites:
                total.add(f"site-{site}", 1.0 + site, partial(stored, contributions[site].tobytes()))
            current, state = strategy.step(current, np.concatenate(list(total.mean())), state)
        return current

    np.testing.assert_allclose(end(order), end(sorted(order)), rtol=2e-6, atol=1e-7)


def test_a_step_on_slices_gives_the_slices_of_the_step(strategy: SumStrategy) -> None:
    """Each value goes its own way, so a model too large for memory is stepped a block at a time."""
    rng = np.random.default_rng(11)
    model = rng.normal(size=SIZE).astype(np.float32)
    state = strategy.initial(SIZE)
    _, state = strategy.step(model, rng.normal(size=SIZE), state)
    update = rng.normal(size=SIZE)

    whole, after = strategy.step(model, update, state)

    for part in (slice(0, 3), slice(3, SIZE)):
        piece, kept = strategy.step(model[part], update[part], {name: each[part] for name, each in state.items()})
        assert piece.tobytes() == whole[part].tobytes()
        assert {name: each.tobytes() for name, each in kept.items()} == {
            name: each[part].tobytes() for name, each in after.items()
        }


def test_a_quadratic_converges(strategy: SumStrategy) -> None:
    """Four sites whose quadratics have one curvature and different optima bring the model to the mean of the optima."""
    optima = np.random.default_rng(3).normal(size=(4, SIZE))
    goal = optima.mean(axis=0)
    current, state = np.zeros(SIZE, np.float32), strategy.initial(SIZE)
    for _ in range(600):
        mean_update = np.mean([0.1 * (optimum - current) for optimum in optima], axis=0)
        current, state = strategy.step(current, mean_update, state)
    assert np.linalg.norm(current - goal) < 1e-4 * np.linalg.norm(goal)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_is_refused(strategy: SumStrategy, model: F32, bad: float) -> None:
    """NaN or an infinity in the mean update is refused, the state is as it was, and the round can be repeated."""
    good = updates(1)[0]
    spoilt = good.copy()
    spoilt[3] = bad
    state = strategy.initial(SIZE)
    before = frozen(state)
    with pytest.raises(RemoteProtocolError, match=r"mean update holds NaN or infinite values.*discard this round"):
        strategy.step(model, spoilt, state)
    assert frozen(state) == before
    moved, _ = strategy.step(model, good, state)
    assert np.isfinite(moved).all()


def test_a_step_to_infinity_is_refused(strategy: SumStrategy, model: F32) -> None:
    """An update too large for the next model or state is the job author's to mend; the state is as it was."""
    state = strategy.initial(SIZE)
    before = frozen(state)
    with pytest.raises(ConfigurationError, match=r"leads to NaN or infinite values.*lower strategy\.learning_rate"):
        strategy.step(model, np.full(SIZE, 1e300), state)
    assert frozen(state) == before


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_an_update_of_another_length_is_refused(strategy: SumStrategy, model: F32, size: int) -> None:
    """An update that is not as long as the model is never broadcast."""
    with pytest.raises(LocalProtocolError, match=f"a model of {SIZE} values .* shape \\({size},\\)"):
        strategy.step(model, np.zeros(size), strategy.initial(SIZE))


@pytest.mark.parametrize("key", ["surprise", "learning_rates"])
def test_settings_refuse_an_unknown_key(name: str, key: str) -> None:
    """A key that the strategy does not know is refused."""
    with pytest.raises(ValidationError, match=key):
        plugins.load("strategies", name).Settings(**{"name": name, key: 1.0})


def test_settings_refuse_another_name(name: str) -> None:
    """One strategy's settings cannot bear another's name."""
    with pytest.raises(ValidationError, match=name):
        plugins.load("strategies", name).Settings(name=f"not-{name}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "0.5", True])
def test_settings_refuse_numbers_that_are_none(name: str, value: object) -> None:
    """No hyper-parameter takes NaN, an infinity, a negative number, a text or a truth value."""
    declared = plugins.load("strategies", name).Settings
    for key in numbers(declared):
        with pytest.raises(ValidationError, match=key):
            declared(**{"name": name, key: value})


def test_settings_take_whole_numbers(name: str) -> None:
    """TOML's `learning_rate = 1` is as good as `1.0`."""
    declared = plugins.load("strategies", name).Settings
    for key in numbers(declared) - {"momentum", "beta1", "beta2"}:  # shares, which must stay below 1
        assert getattr(declared(**{"name": name, key: 1}), key) == 1.0
