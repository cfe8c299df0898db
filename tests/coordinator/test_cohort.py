import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import cohort

SITES = ("athens", "berlin", "cork", "dublin")
some = st.sets(st.sampled_from(SITES))


def test_only_sites_that_accepted_and_attend_take_part() -> None:
    """A site that accepted and went away, and one that attends without having accepted, are left out."""
    assert cohort.ready(["athens", "berlin", "cork"], ["berlin", "cork", "dublin"], 2) == {"berlin", "cork"}


def test_too_few_sites_are_no_cohort() -> None:
    """With fewer than needed nobody is asked, rather than a smaller cohort."""
    assert cohort.ready(["athens", "berlin"], ["berlin"], 2) == frozenset()


@pytest.mark.parametrize(
    ("attending", "short"), [((), 3), (("athens",), 2), (("athens", "dublin"), 2), (SITES, 0)], ids=str
)
def test_the_missing_are_counted_among_those_that_accepted(attending: tuple[str, ...], short: int) -> None:
    """What is missing is told as a number of sites that accepted and attend, never below zero."""
    assert cohort.missing(["athens", "berlin", "cork"], attending, 3) == short


def test_a_job_is_hopeless_when_those_left_are_too_few() -> None:
    """Two refusals of four leave two: enough for two, hopeless for three."""
    refused = ["athens", "berlin"]

    assert not cohort.hopeless(SITES, refused, 2)
    assert cohort.hopeless(SITES, refused, 3)


@given(accepted=some, attending=some, needed=st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_a_step_starts_exactly_when_nobody_is_missing(accepted: set[str], attending: set[str], needed: int) -> None:
    """`ready` and `missing` agree, whoever is there."""
    assert bool(cohort.ready(accepted, attending, needed)) == (cohort.missing(accepted, attending, needed) == 0)
