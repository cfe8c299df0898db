import numpy as np
import pytest

from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError, WhoActs
from federation.job import StrategySettings
from federation.vector import F64
from strategies import fedavg, fedavgm
from strategies.strategy import GroupStep, GroupStrategy, LocalTerms, ServerStep, State, SumStrategy, load


def add(update: F64, state: State) -> tuple[F64, State]:
    """A formula that remembers the sum of all updates."""
    return update, {"gathered": state["gathered"] + update}


STEP = ServerStep(add, memory={"gathered": 1.5})
MODEL = np.array([1.0, 2.0], np.float32)


def test_a_formula_is_a_strategy() -> None:
    """One function and the names it remembers make a strategy that adds nothing to local training."""
    assert isinstance(STEP, SumStrategy)
    assert STEP.local == LocalTerms(proximal=0.0)
    moved, state = STEP.step(MODEL, np.array([0.5, 0.25]), STEP.initial(2))
    assert moved.tolist() == [1.5, 2.25]
    assert state["gathered"].tolist() == [2.0, 1.75]


def test_the_change_is_added_in_float64() -> None:
    """The sum is rounded to float32 once, at the end."""
    model = np.array([1.0], np.float32)
    half = 2.0**-24  # half of float32's last bit at 1: alone it rounds to even, away from a third it does not
    moved, _ = ServerStep(lambda update, state: (update, state)).step(model, np.array([half + 2.0**-50]), {})
    assert float(moved[0]) == 1.0 + 2.0**-23


@pytest.mark.parametrize(
    ("model", "update", "state", "problem"),
    [
        (MODEL.astype(np.float64), np.zeros(2), {"gathered": np.zeros(2)}, "must be one float32 vector, not float64"),
        (MODEL.reshape(1, 2), np.zeros((1, 2)), {"gathered": np.zeros((1, 2))}, r"one float32 vector.*shape \(1, 2\)"),
        (MODEL, np.zeros(1), {"gathered": np.zeros(2)}, r"mean update of a model of 2 values.*shape \(1,\)"),
        (MODEL, np.zeros(2, np.float32), {"gathered": np.zeros(2)}, "mean update .*, not float32"),
        (MODEL, np.zeros(2), {}, r"remembers \['gathered'\]; this state holds \[\]"),
        (MODEL, np.zeros(2), {"gathered": np.zeros(2), "other": np.zeros(2)}, "holds .*'other'"),
        (MODEL, np.zeros(2), {"gathered": np.zeros(1)}, r"'gathered' for a model of 2 values.*shape \(1,\)"),
        (MODEL, np.zeros(2), {"gathered": np.zeros(2, np.float32)}, "'gathered' .*, not float32"),
    ],
)
def test_what_does_not_fit_is_refused(model: np.ndarray, update: np.ndarray, state: State, problem: str) -> None:
    """Model, update and state of other sizes, types or names are a bug of ours, and are never broadcast or guessed."""
    with pytest.raises(LocalProtocolError, match=problem):
        STEP.step(model, update, state)


def test_a_state_that_overflows_is_refused() -> None:
    """A finite model does not excuse a state that is not."""

    def square(update: F64, state: State) -> tuple[F64, State]:
        return update, {"gathered": state["gathered"] * 1e308}

    state = {"gathered": np.full(2, 1e308)}
    with pytest.raises(ConfigurationError, match="model and state stay") as refused:
        ServerStep(square, memory={"gathered": 0.0}).step(MODEL, np.zeros(2), state)
    assert refused.value.who is WhoActs.AUTHOR
    assert state["gathered"].tolist() == [1e308, 1e308]


def test_load_finds_the_file_by_the_settings_name() -> None:
    """`load` makes the strategy of the file that bears the name."""
    loaded = load(fedavgm.Settings(name="fedavgm"))
    assert set(loaded.initial(1)) == {"velocity"}


def test_load_refuses_a_name_without_a_file() -> None:
    """A strategy that is not there is refused with the nearest name."""
    with pytest.raises(ConfigurationError, match=r"no strategies plug-in named 'fedavq'.*did you mean 'fedavg"):
        load(StrategySettings(name="fedavq"))


def test_load_refuses_settings_of_another_type() -> None:
    """Settings that only bear the name, without the strategy's choices, are refused."""
    with pytest.raises(LocalProtocolError, match="'fedavg' needs its own Settings, not StrategySettings"):
        load(StrategySettings(name=fedavg.Settings(name="fedavg").name))


def test_a_rule_over_groups_stands_before_any_server_step() -> None:
    """What it makes of the groups' means is the update of the server's step, with its memory and local terms."""
    server = ServerStep(add, memory={"gathered": 1.5}, local=LocalTerms(proximal=0.25))
    both = GroupStep(lambda means: means.max(axis=0), server)
    assert isinstance(both, GroupStrategy)
    assert not isinstance(both, SumStrategy)
    assert both.local == LocalTerms(proximal=0.25)
    moved, state = both.step_groups(MODEL, np.array([[0.5, -1.0], [0.25, 0.25]]), both.initial(2))
    assert moved.tolist() == [1.5, 2.25]
    assert state["gathered"].tolist() == [2.0, 1.75]


def test_groups_of_another_size_than_the_models_are_refused() -> None:
    """They are never broadcast."""
    with pytest.raises(LocalProtocolError, match=r"mean update of a model of 2 values.*shape \(3,\)"):
        GroupStep(lambda means: means[0], STEP).step_groups(MODEL, np.zeros((4, 3)), STEP.initial(2))


def test_a_rule_that_overflows_is_refused_in_words() -> None:
    """Without a warning of numpy's, and the model stays."""
    both = GroupStep(lambda means: means.sum(axis=0), STEP)
    with pytest.raises(RemoteProtocolError, match="the mean update holds NaN or infinite values"):
        both.step_groups(MODEL, np.full((2, 2), 1.5e308), STEP.initial(2))
