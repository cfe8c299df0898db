import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import RemoteProtocolError
from federation.vector import F64
from tasks._evaluation import COARSE, BinaryCounts, ClassCounts, Counts, ValueCounts


def exact_auc(scores: F64, labels: F64) -> float:
    """The share of pairs in order, ties half: the definition."""
    gaps = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(np.mean((gaps > 0) + (gaps == 0) / 2))


@given(seed=st.integers(0, 1000), spread=st.floats(0.3, 4), shift=st.floats(-4, 4))
@settings(max_examples=50, deadline=None)
def test_auc_from_summed_histograms_is_the_auc_of_all_rows(seed: int, spread: float, shift: float) -> None:
    """Two sites' histograms together give the pooled AUC within half a point when scores spread over several bins."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 300)
    labels[:2] = 0, 1
    scores = (rng.normal(size=300) + labels) * spread + shift
    counts, outputs = BinaryCounts(), scores.astype(np.float32)[:, None]
    total = counts.count(outputs[:120], labels[:120]) + counts.count(outputs[120:], labels[120:])
    found = counts.metrics(total)
    assert found["auc"] == pytest.approx(exact_auc(scores, labels), abs=0.005)
    assert found["accuracy"] == pytest.approx(np.mean((scores > 0) == labels))
    assert found["n"] == 300


def test_scores_much_closer_than_a_bin_count_as_tied() -> None:
    """A known limit: scores that differ by a thousandth at a logit of 5 are one score to the histogram."""
    counts = BinaryCounts()
    outputs = np.array([[5.0], [5.001]], np.float32)
    assert counts.metrics(counts.count(outputs, np.array([0, 1])))["auc"] == 0.5


def test_equal_scores_have_an_auc_of_one_half() -> None:
    """Ties count half."""
    counts = BinaryCounts()
    assert counts.metrics(counts.count(np.zeros((4, 1), np.float32), np.array([0, 1, 1, 0])))["auc"] == 0.5


def test_auc_is_left_out_where_one_class_is_missing() -> None:
    """Nothing is NaN: what the rows do not define is not told."""
    counts = BinaryCounts()
    found = counts.metrics(counts.count(np.ones((3, 1), np.float32), np.ones(3, np.int64)))
    assert set(found) == {"n", "loss", "accuracy"}


def test_log_loss_is_exact_and_finite_at_extreme_scores() -> None:
    """The loss of a certain mistake is its logit, never infinite."""
    counts = BinaryCounts()
    found = counts.metrics(counts.count(np.array([[1000.0]], np.float32), np.array([0])))
    assert found["loss"] == 1000.0


def test_no_rows_have_no_metrics() -> None:
    """An evaluation without rows tells that and nothing else."""
    for counts in (BinaryCounts(), ClassCounts(3), ValueCounts(1.0)):
        empty = counts.count(np.empty((0, 3), np.float32), np.empty(0, np.int64))
        assert counts.metrics(empty) == {"n": 0.0}


def test_class_metrics_are_those_of_the_confusion_matrix() -> None:
    """Three of four right; the class that is never there does not count to the means."""
    counts = ClassCounts(3)
    outputs = np.log(np.array([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.6, 0.2, 0.2]], np.float32))
    found = counts.metrics(counts.count(outputs, np.array([0, 0, 1, 1])))
    assert found["accuracy"] == 0.75
    assert found["balanced_accuracy"] == pytest.approx((1 + 0.5) / 2)
    assert found["macro_f1"] == pytest.approx((2 * 2 / 5 + 2 * 1 / 3) / 2)
    assert found["loss"] == pytest.approx(-np.log([0.8, 0.6, 0.7, 0.2]).mean(), rel=1e-6)


def test_value_metrics_are_in_the_labels_unit() -> None:
    """A scaled error of 0.1 is ten times that where the range's half-width is ten; constant labels have no r2."""
    counts = ValueCounts(half=10.0)
    total = counts.count(np.array([[0.1], [0.6]], np.float32), np.array([0.0, 0.5], np.float32))
    found = counts.metrics(total)
    assert found["rmse"] == pytest.approx(1.0, rel=1e-6)
    assert found["mae"] == pytest.approx(1.0, rel=1e-6)
    assert found["r2"] == pytest.approx(1 - 0.01 / 0.0625, rel=1e-6)
    constant = counts.metrics(counts.count(np.zeros((2, 1), np.float32), np.full(2, 0.3, np.float32)))
    assert set(constant) == {"n", "loss", "rmse", "mae"}


@pytest.mark.parametrize("counts", [BinaryCounts(), ClassCounts(3), ValueCounts(1.0)])
def test_sums_that_no_rows_give_are_refused(counts: Counts) -> None:
    """A wrong length, a NaN and a negative count come from a peer, not from rows."""
    with pytest.raises(RemoteProtocolError, match="has 2 words where the task counts"):
        counts.metrics(np.zeros(2))
    for place, value in ((0, np.nan), (0, -1.0), (1, -0.5), (counts.size - 1, np.inf)):
        total = np.zeros(counts.size)
        total[place] = value
        with pytest.raises(RemoteProtocolError, match="holds counts that no test rows give"):
            counts.metrics(total)


@pytest.mark.parametrize("counts", [BinaryCounts(), ClassCounts(3)])
def test_rows_that_are_counted_in_no_cell_are_refused(counts: Counts) -> None:
    """Each row stands in one cell of the histogram or of the confusion matrix."""
    total = np.zeros(counts.size)
    total[0] = 3
    with pytest.raises(RemoteProtocolError, match="holds counts that no test rows give"):
        counts.metrics(total)


def test_a_secure_sum_has_32_bins_and_nearly_the_same_auc() -> None:
    """The most that an exact sum may have; scores that spread keep their order."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 4000)
    outputs = (rng.normal(size=4000) + labels).astype(np.float32)[:, None]
    fine, coarse = BinaryCounts(), BinaryCounts(COARSE)
    found = [counts.metrics(counts.count(outputs, labels))["auc"] for counts in (fine, coarse)]
    assert coarse.size == 3 + 2 * 32
    assert abs(found[0] - found[1]) < 0.005
