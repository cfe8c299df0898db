"""Waits between tries: bounded, growing, spread, and short again once it went well."""

from itertools import pairwise
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from client.backoff import Backoff

FIRST = st.floats(0.01, 5.0)
LONGEST = st.floats(5.0, 600.0)


@given(FIRST, LONGEST, st.integers(1, 60))
@settings(deadline=None, max_examples=50)
def test_every_wait_lies_between_half_and_all_of_its_limit(first: float, longest: float, tries: int) -> None:
    """The limit doubles from `first` and stops at `longest`, after however many tries."""
    backoff = Backoff(first, longest)
    for number in range(tries):
        limit = min(longest, first * 2.0**number)
        assert limit / 2 <= backoff.seconds() <= limit


@given(FIRST, LONGEST)
@settings(deadline=None, max_examples=50)
def test_waits_grow_until_they_are_longest(first: float, longest: float) -> None:
    """With the same luck each time no wait is shorter than the one before, and the last is as long as it gets."""
    with mock.patch("random.uniform", return_value=1.0):
        backoff = Backoff(first, longest)
        waits = [backoff.seconds() for _ in range(20)]
    assert all(before < after or before == after == longest for before, after in pairwise(waits))
    assert waits[-1] == longest


@given(st.integers(1, 30))
@settings(deadline=None, max_examples=20)
def test_it_starts_over_once_it_went_well(tries: int) -> None:
    """The wait after a reset is a first wait."""
    backoff = Backoff(1.0, 600.0)
    for _ in range(tries):
        backoff.seconds()
    backoff.reset()
    assert 0.5 <= backoff.seconds() <= 1.0


def test_two_that_were_cut_off_together_do_not_come_back_together() -> None:
    """A hundred sites' fifth waits are all different."""
    waits = set()
    for _ in range(100):
        backoff = Backoff()
        waits.add([backoff.seconds() for _ in range(5)][-1])
    assert len(waits) == 100
