import pytest

from federation.disclosure import shown, withheld
from federation.messages import Metric

LOSS, AUC = Metric("loss", 0.5), Metric("auc", 0.8)


@pytest.mark.parametrize(
    ("rows", "told"),
    [(0, ()), (4, ()), (5, ("n",)), (19, ("n",)), (20, ("n", "loss", "auc")), (254, ("n", "loss", "auc"))],
)
def test_no_count_below_5_and_no_rate_over_fewer_than_20_rows_is_shown(rows: int, told: tuple[str, ...]) -> None:
    """What is not shown is said not to be."""
    measured = (Metric("n", float(rows)), LOSS, AUC)
    assert tuple(metric.name for metric in shown(measured)) == told
    assert withheld(measured) == ("" if rows >= 20 else "over fewer than 20 rows: not shown")


def test_metrics_of_which_nobody_knows_the_rows_are_shown() -> None:
    """So is that nothing was measured."""
    assert (shown((LOSS, AUC)), withheld((LOSS, AUC))) == ((LOSS, AUC), "")
    assert (shown(()), withheld(())) == ((), "")
