import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.partition import stratified_split


@given(
    classes=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 100),
)
@settings(max_examples=50, deadline=None)
def test_every_row_is_in_one_part_and_every_class_gives_its_share(
    classes: list[int], fraction: float, seed: int
) -> None:
    """The parts are disjoint and complete, and no class is a whole row away from its exact share of the test part."""
    strata = np.array(classes, dtype=np.int64)
    train, test = stratified_split(strata, fraction, np.random.default_rng(seed))
    assert sorted([*train, *test]) == list(range(strata.size))
    assert len(test) == np.ceil(strata.size * fraction - 1e-9)
    for name in set(classes):
        exact = (strata == name).sum() * len(test) / strata.size
        assert abs((strata[test] == name).sum() - exact) < 1


def test_the_test_part_has_the_published_sizes() -> None:
    """A third of four hospitals' rows, rounded up, gives the sizes of the published split."""
    sizes = {303: 104, 261: 89, 46: 16, 130: 45}
    for rows, expected in sizes.items():
        strata = np.arange(rows) % 2
        assert len(stratified_split(strata, 0.34, np.random.default_rng(0))[1]) == expected


def test_equal_seeds_divide_alike_and_other_seeds_do_not() -> None:
    """The generator alone decides which rows are drawn."""
    strata = np.arange(100) % 3
    first, again, other = (stratified_split(strata, 0.3, np.random.default_rng(seed))[1] for seed in (1, 1, 2))
    assert list(first) == list(again)
    assert list(first) != list(other)


def test_no_rows_are_two_empty_parts() -> None:
    """An empty table can be divided."""
    train, test = stratified_split(np.empty(0, dtype=np.int64), 0.3, np.random.default_rng(0))
    assert train.size == test.size == 0
