"""What every strategy of either kind promises; a new file in `strategies/` is picked up by itself."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from federation import plugins
from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from federation.job import StrategySettings
from federation.vector import F32, F64
from privacy.secure_aggregation.plain import PlainSum
from strategies.strategy import GroupStrategy, State, Strategy, SumStrategy, load

SIZE = 17
GROUPS = 7


def needs_groups(name: str) -> bool:
    """Whether a strategy declares that it must see groups."""
    declared: int = plugins.load("strategies", name).Settings.fewest_groups
    return declared > 0


OVER_GROUPS = [name for name in plugins.names("strategies") if needs_groups(name)]


@pytest.fixture(params=plugins.names("strategies"))
def name(request: pytest.FixtureRequest) -> str:
    """Each strategy's name."""
    return str(request.param)


@pytest.fixture
def strategy(name: str) -> Strategy:
    """Each strategy with its defaults."""
    return load(defaults(name))


@pytest.fixture(params=OVER_GROUPS)
def robust(request: pytest.FixtureRequest) -> GroupStrategy:
    """Each strategy over groups with its defaults."""
    made = load(defaults(str(request.param)))
    assert isinstance(made, GroupStrategy)
    return made


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


def stepped(strategy: Strategy, model: F32, update: F64, state: State) -> tuple[F32, State]:
    """A step of either kind over a mean update; groups, where it sees them, all have that one."""
    if isinstance(strategy, SumStrategy):
        return strategy.step(model, update, state)
    return strategy.step_groups(model, np.stack([update] * GROUPS), state)


def frozen(state: State) -> dict[str, bytes]:
    """A state bit for bit."""
    return {key: vector.tobytes() for key, vector in state.items()}


def thawed(stored: Mapping[str, bytes]) -> State:
    """A state from its bytes, as a store gives it back: read-only."""
    return {key: np.frombuffer(content, "<f8") for key, content in stored.items()}


def test_it_declares_itself(name: str, strategy: Strategy) -> None:
    """A strategy file offers Settings that bear its name and say what it must see, and `make` gives such a strategy."""
    module = plugins.load("strategies", name)
    assert issubclass(module.Settings, StrategySettings)
    assert {"Settings", "make"} <= set(module.__all__)
    assert isinstance(strategy, GroupStrategy) is needs_groups(name)
    assert isinstance(strategy, SumStrategy) is not needs_groups(name)
    assert strategy.local.proximal >= 0
    assert defaults(name).name == name


def test_shapes_and_types(strategy: Strategy, model: F32) -> None:
    """A step gives a float32 model of the same size, and a state of the same names: float64 vectors of that size."""
    state = strategy.initial(SIZE)
    moved, after = stepped(strategy, model, updates(1)[0], state)
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
            current, state = stepped(strategy, current, update, state)
        ends.append((current.tobytes(), frozen(state)))
    assert ends[0] == ends[1]


def test_a_first_update_of_zero_moves_nothing(strategy: Strategy, model: F32) -> None:
    """When all sites return the model as it was, the first step leaves it as it was."""
    moved, _ = stepped(strategy, model, np.zeros(SIZE), strategy.initial(SIZE))
    assert moved.tobytes() == model.tobytes()


def test_the_first_step_goes_where_the_update_points(strategy: Strategy, model: F32) -> None:
    """No coordinate moves against its first update."""
    update = updates(1)[0]
    moved, _ = stepped(strategy, model, update, strategy.initial(SIZE))
    assert (np.sign(moved - model) == np.sign(update)).all()


@given(cut=st.integers(0, 8), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("each", plugins.names("strategies"))
def test_a_restart_loses_nothing(each: str, cut: int, seed: int) -> None:
    """A new process that reads model and state from bytes at any round goes on bit for bit."""
    rounds = updates(8, seed)
    start = np.zeros(SIZE, np.float32)

    def run(strategy: Strategy, current: F32, state: State, part: list[F64]) -> tuple[F32, State]:
        for update in part:
            current, state = stepped(strategy, current, update, state)
        return current, state

    unbroken, final = run(load(defaults(each)), start, load(defaults(each)).initial(SIZE), rounds)
    half, state = run(load(defaults(each)), start, load(defaults(each)).initial(SIZE), rounds[:cut])
    again = np.frombuffer(half.tobytes(), "<f4")
    resumed, after = run(load(defaults(each)), again, thawed(frozen(state)), rounds[cut:])
    assert resumed.tobytes() == unbroken.tobytes()
    assert frozen(after) == frozen(final)


def test_the_inputs_stay_as_they_were(strategy: Strategy, model: F32) -> None:
    """A step changes neither model, update nor state, and works on read-only ones."""
    current, state = stepped(strategy, model, updates(1)[0], strategy.initial(SIZE))
    update = updates(2)[1]
    current.flags.writeable = update.flags.writeable = False
    for vector in state.values():
        vector.flags.writeable = False
    before = (current.tobytes(), update.tobytes(), frozen(state))
    moved, _ = stepped(strategy, current, update, state)
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
            current, state = stepped(strategy, current, np.concatenate(list(total.mean())), state)
        return current

    np.testing.assert_allclose(end(order), end(sorted(order)), rtol=2e-6, atol=1e-7)


def test_a_step_on_slices_gives_the_slices_of_the_step(strategy: Strategy) -> None:
    """Each value goes its own way, so a model too large for memory is stepped a block at a time."""
    rng = np.random.default_rng(11)
    model = rng.normal(size=SIZE).astype(np.float32)
    state = strategy.initial(SIZE)
    _, state = stepped(strategy, model, rng.normal(size=SIZE), state)
    update = rng.normal(size=SIZE)

    whole, after = stepped(strategy, model, update, state)

    for part in (slice(0, 3), slice(3, SIZE)):
        piece, kept = stepped(strategy, model[part], update[part], {name: each[part] for name, each in state.items()})
        assert piece.tobytes() == whole[part].tobytes()
        assert {name: each.tobytes() for name, each in kept.items()} == {
            name: each[part].tobytes() for name, each in after.items()
        }


def test_a_quadratic_converges(strategy: Strategy) -> None:
    """Four sites whose quadratics have one curvature and different optima bring the model to the mean of the optima."""
    optima = np.random.default_rng(3).normal(size=(4, SIZE))
    goal = optima.mean(axis=0)
    current, state = np.zeros(SIZE, np.float32), strategy.initial(SIZE)
    for _ in range(600):
        mean_update = np.mean([0.1 * (optimum - current) for optimum in optima], axis=0)
        current, state = stepped(strategy, current, mean_update, state)
    assert np.linalg.norm(current - goal) < 1e-4 * np.linalg.norm(goal)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_is_refused(strategy: Strategy, model: F32, bad: float) -> None:
    """NaN or an infinity in the mean update is refused, the state is as it was, and the round can be repeated."""
    good = updates(1)[0]
    spoilt = good.copy()
    spoilt[3] = bad
    state = strategy.initial(SIZE)
    before = frozen(state)
    with pytest.raises(RemoteProtocolError, match=r"mean update holds NaN or infinite values.*discard this round"):
        stepped(strategy, model, spoilt, state)
    assert frozen(state) == before
    moved, _ = stepped(strategy, model, good, state)
    assert np.isfinite(moved).all()


def test_a_step_to_infinity_is_refused(strategy: Strategy, model: F32) -> None:
    """An update too large for the next model or state is the job author's to mend; the state is as it was."""
    state = strategy.initial(SIZE)
    before = frozen(state)
    with pytest.raises(ConfigurationError, match=r"leads to NaN or infinite values.*lower strategy\.learning_rate"):
        stepped(strategy, model, np.full(SIZE, 1e300), state)
    assert frozen(state) == before


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_an_update_of_another_length_is_refused(strategy: Strategy, model: F32, size: int) -> None:
    """An update that is not as long as the model is never broadcast."""
    with pytest.raises(LocalProtocolError, match=f"a model of {SIZE} values .* shape \\({size},\\)"):
        stepped(strategy, model, np.zeros(size), strategy.initial(SIZE))


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
    for key in numbers(declared) - {"momentum", "beta", "beta1", "beta2"}:  # shares, which must stay below 1
        assert getattr(declared(**{"name": name, key: 1}), key) == 1.0


# ----------------------------------------------------------------------------------------------------- over groups


def moved_by(robust: GroupStrategy, means: F64) -> F64:
    """How far the first step moves a model of zeros."""
    moved, _ = robust.step_groups(np.zeros(means.shape[1], np.float32), means, robust.initial(means.shape[1]))
    return moved.astype(np.float64)


@pytest.mark.parametrize("each", OVER_GROUPS)
@given(bad=st.floats(-1e30, 1e30), groups=st.integers(0, 8), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_one_bad_group_moves_no_value_out_of_the_others_range(each: str, bad: float, groups: int, seed: int) -> None:
    """From the fewest groups that it declares on, whatever one of them sends."""
    declared = plugins.load("strategies", each).Settings.fewest_groups
    robust = load(defaults(each))
    assert isinstance(robust, GroupStrategy)
    honest = np.random.default_rng(seed).normal(size=(declared - 1 + groups, SIZE)).astype(np.float32)
    moved = moved_by(robust, np.vstack([honest, np.full((1, SIZE), bad)]).astype(np.float64))
    alike = [moved_by(robust, np.stack([edge] * 3).astype(np.float64)) for edge in (honest.min(0), honest.max(0))]
    assert (alike[0] <= moved).all()
    assert (moved <= alike[1]).all()


@pytest.mark.parametrize("each", OVER_GROUPS)
@given(order=st.permutations(range(9)), groups=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_the_order_of_the_groups_does_not_matter(each: str, order: list[int], groups: int) -> None:
    """Bit for bit, however many there are."""
    robust = load(defaults(each))
    assert isinstance(robust, GroupStrategy)
    means = np.random.default_rng(4).normal(size=(9, SIZE))
    shuffled = [place for place in order if place < groups]
    assert moved_by(robust, means[shuffled]).tobytes() == moved_by(robust, means[:groups]).tobytes()


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 40])
def test_a_step_over_groups_on_slices_gives_the_slices_of_the_step(robust: GroupStrategy, groups: int) -> None:
    """Bit for bit, down to a single value: blocks are as short as many groups make them."""
    rng = np.random.default_rng(13)
    model, means = rng.normal(size=SIZE).astype(np.float32), rng.normal(size=(groups, SIZE))
    whole, _ = robust.step_groups(model, means, robust.initial(SIZE))
    for part in (slice(0, 1), slice(1, 4), slice(4, SIZE)):
        piece, _ = robust.step_groups(model[part], means[:, part], robust.initial(part.stop - part.start))
        assert piece.tobytes() == whole[part].tobytes()


def test_groups_are_not_changed_and_may_be_read_only(robust: GroupStrategy, model: F32) -> None:
    """The means belong to whoever summed them."""
    means = np.random.default_rng(6).normal(size=(5, SIZE))
    means.flags.writeable = False
    before = means.tobytes()
    robust.step_groups(model, means, robust.initial(SIZE))
    assert means.tobytes() == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_group_that_is_not_finite_is_refused(robust: GroupStrategy, model: F32, bad: float) -> None:
    """It is not left out in silence: a robust rule is for wrong numbers, not for none."""
    means = np.zeros((5, SIZE))
    means[2, 3] = bad
    with pytest.raises(RemoteProtocolError, match=r"a group's mean update holds NaN or infinite.*discard this round"):
        robust.step_groups(model, means, robust.initial(SIZE))


@pytest.mark.parametrize("means", [np.zeros((0, SIZE)), np.zeros(SIZE), np.zeros((3, SIZE), np.float32)])
def test_what_is_no_row_for_each_group_is_refused(
    robust: GroupStrategy, model: F32, means: npt.NDArray[np.floating]
) -> None:
    """No group, one vector, and another type are a bug of ours."""
    with pytest.raises(LocalProtocolError, match="must be one row of float64 values for each group"):
        robust.step_groups(model, means, robust.initial(SIZE))
