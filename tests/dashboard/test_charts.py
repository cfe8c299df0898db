"""The charts draw each metric with its best round, and each site's seconds, however many sites there are."""

from dashboard import charts
from dashboard.queries import Headline, RoundRow

HEADLINES = (Headline("accuracy", 0.8, 0.1, lower_is_better=False), Headline("auc", 0.9, 0.1, lower_is_better=False))


def row(number: int, work: dict[str, float], **metrics: float) -> RoundRow:
    """One round."""
    return RoundRow(number, metrics, 10.0, work, 0)


def test_each_metric_is_a_line_and_the_best_round_a_star() -> None:
    """Rounds that were not evaluated leave no point; the star stands on the best round's value."""
    rounds = (row(0, {}, accuracy=0.6), row(1, {}, accuracy=0.8, auc=0.9), row(2, {}), row(3, {}, accuracy=0.7))
    figure = charts.metrics(rounds, HEADLINES, best_round=1)
    drawn = [(trace.name, trace.mode, tuple(trace.x), tuple(trace.y)) for trace in figure.data]
    assert drawn == [
        ("accuracy", "lines+markers", (0, 1, 3), (0.6, 0.8, 0.7)),
        (None, "markers", (1,), (0.8,)),
        ("auc", "lines+markers", (1,), (0.9,)),
        (None, "markers", (1,), (0.9,)),
    ]
    assert [note.text for note in figure.layout.annotations] == ["best round 1"]


def test_without_a_best_round_nothing_is_marked() -> None:
    """Before the first round is the best there is no star."""
    figure = charts.metrics((row(0, {}, accuracy=0.6),), HEADLINES[:1], best_round=0)
    assert [trace.mode for trace in figure.data] == ["lines+markers"]
    assert figure.layout.annotations == ()


def test_seconds_are_stacked_by_site() -> None:
    """Each site is a bar in each training round; round 0 is none."""
    rounds = (row(0, {"a": 9.0}), row(1, {"a": 1.0, "b": 2.0}), row(2, {"b": 3.0}))
    figure = charts.seconds(rounds)
    assert [(trace.name, tuple(trace.x), tuple(trace.y)) for trace in figure.data] == [
        ("a", (1, 2), (1.0, 0.0)),
        ("b", (1, 2), (2.0, 3.0)),
    ]
    assert figure.layout.barmode == "stack"


def test_of_many_sites_the_busiest_are_told_apart() -> None:
    """Beyond eight sites the busiest seven have bars of their own and the others share one; no second is lost."""
    work = {f"site-{number:02}": float(number) for number in range(1, 21)}
    figure = charts.seconds((row(1, work),))
    assert [trace.name for trace in figure.data] == [*(f"site-{number}" for number in range(14, 21)), "other sites"]
    assert sum(trace.y[0] for trace in figure.data) == sum(work.values())
