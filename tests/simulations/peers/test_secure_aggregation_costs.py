import numpy as np
import pytest

from federation.errors import ParleyError
from simulations.peers.secure_aggregation_costs import COORDINATOR, TRANSPORT, Cost, Meter, Updates


class Clock:
    """CPU seconds as a test says they are."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Those that the test has set."""
        return self.now


def test_each_second_counts_for_one_party() -> None:
    """Time in a block is its party's, and not that of the block around it; outside of any it is nobody's."""
    clock = Clock()
    meter = Meter(clock)
    clock.now = 100.0
    with meter.of(COORDINATOR):
        clock.now += 1
        with meter.of(0):
            clock.now += 2
            with meter.of(None):
                clock.now += 4
            clock.now += 8
        clock.now += 16
    clock.now += 32

    assert meter.take() == {COORDINATOR: 17.0, 0: 10.0}
    assert meter.take() == {}


def test_a_block_that_fails_still_ends() -> None:
    """Whoever was at work before it is at work again."""
    clock = Clock()
    meter = Meter(clock)
    with meter.of(1):
        with pytest.raises(ZeroDivisionError), meter.of(2):
            _ = 1 / (clock.now - clock.now)
        clock.now += 5

    assert meter.take() == {1: 5.0, 2: 0.0}


def test_what_is_under_way_is_taken_in_parts() -> None:
    """`take` inside a block gives what was used until then."""
    clock = Clock()
    meter = Meter(clock)
    with meter.of(1):
        clock.now = 3.0
        assert meter.take() == {1: 3.0}
        clock.now = 7.0
    assert meter.take() == {1: 4.0}


def test_a_cost_is_of_one_round_and_one_site() -> None:
    """Sums over two rounds and the sites that saw them through, divided; what a missing site did is left out."""
    cpu = {COORDINATOR: 6.0, TRANSPORT: 8.0, 0: 100.0, 1: 1.0, 2: 3.0}

    cost = Cost.of(cpu, {0: 1000, 1: 10, 2: 30}, through=[1, 2], times=2)

    assert cost == Cost(client_cpu=1.0, coordinator_cpu=3.0, client_bytes=10.0, transport_cpu=4.0)


def test_updates_are_the_same_for_all_who_ask() -> None:
    """Each site has its own vector, of a norm that neither side clips, and always the same one."""
    updates = Updates(5, 1000)

    assert np.array_equal(updates.of(3), updates.of(3))
    assert not np.array_equal(updates.of(3), updates.of(4))
    assert updates.of(0).dtype == np.float32
    assert 0.8 < float(np.linalg.norm(updates.of(0))) < 1.0


@pytest.mark.parametrize(("sites", "missing"), [(5, 1), (10, 1), (19, 1), (50, 5), (100, 10)])
def test_a_tenth_drops_out(sites: int, missing: int) -> None:
    """And one where there are fewer than twenty."""
    assert len(Updates(sites, 10).missing) == missing


def test_only_the_mean_passes() -> None:
    """A mean over other sites, of another length, or with one value off is no aggregation."""
    updates = Updates(4, 100)
    mean = sum(updates.of(idx).astype(float) for idx in range(3)) / 3
    updates.check("parley", mean, range(3))

    off = mean.copy()
    off[7] += 1e-4
    for wrong, members in ((mean, range(4)), (mean[:-1], range(3)), (off, range(3)), (off * np.nan, range(3))):
        with pytest.raises(ParleyError, match=r"parley's sum over . sites is off by"):
            updates.check("parley", wrong, members)
