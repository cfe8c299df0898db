from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.judging import best_round, stalled
from federation.job import EarlyStop
from federation.messages import Metric
from tasks.task import Better

BETTER: dict[str, Better] = {"auc": "higher", "loss": "lower", "f1": "higher"}

values_of = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


@given(values=values_of, lower=st.booleans())
@settings(deadline=None, max_examples=50)
def test_best_round_is_the_first_of_the_best(values: list[float], lower: bool) -> None:  # noqa: FBT001 - drawn
    """No other round is better, and no earlier one as good, whichever way the metric improves."""
    name = "loss" if lower else "auc"
    metrics = {number: (Metric(name, value),) for number, value in enumerate(values, 1)}

    best = best_round(metrics, name, BETTER)

    assert values[best - 1] == (min(values) if lower else max(values))
    assert best - 1 == values.index(values[best - 1])


def test_best_round_is_the_last_where_nothing_was_measured() -> None:
    """Without a metric, or with one that no round has, the last round's model is taken."""
    metrics = {1: (Metric("auc", 0.9),), 2: (Metric("auc", 0.8),)}

    assert best_round(metrics, None, BETTER) == 2
    assert best_round(metrics, "f1", BETTER) == 2


def test_best_round_passes_over_rounds_without_the_metric() -> None:
    """An AUC that was not defined in a round does not make it the best."""
    assert best_round({1: (), 2: (Metric("auc", 0.6),), 3: ()}, "auc", BETTER) == 2


@given(values=values_of, patience=st.integers(1, 4), gain=st.sampled_from((0.0, 0.5)), lower=st.booleans())
@settings(deadline=None, max_examples=50)
def test_stalled_means_that_the_last_rounds_brought_no_gain(
    values: list[float],
    patience: int,
    gain: float,
    lower: bool,  # noqa: FBT001 - drawn
) -> None:
    """Exactly when each of the last `patience` rounds stayed within `gain` of the best round that counted before."""
    name = "loss" if lower else "auc"
    metrics = {number: (Metric(name, value),) for number, value in enumerate(values, 1)}
    marks = []  # the rounds that were better than the mark before them by more than the gain
    for number, value in enumerate(values):
        if not marks or (values[marks[-1]] - value if lower else value - values[marks[-1]]) > gain:
            marks.append(number)

    assert stalled(metrics, EarlyStop(metric=name, patience=patience, minimum_gain=gain), BETTER) == (
        len(values) - 1 - marks[-1] >= patience
    )


def test_rounds_without_the_metric_stall_nothing() -> None:
    """A metric that is never measured ends no job early."""
    assert not stalled(dict.fromkeys(range(1, 9), ()), EarlyStop(metric="auc", patience=2), BETTER)
