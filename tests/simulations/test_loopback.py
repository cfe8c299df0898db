from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from federation.errors import LocalProtocolError
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.coordinator import Stage
from privacy.secure_aggregation.rostersum.coordinator_events import Persist, Reason
from privacy.secure_aggregation.rostersum.durable import Durable
from privacy.secure_aggregation.rostersum.messages import Ready, Refuse, Train, Upload
from privacy.secure_aggregation.rostersum.terms import Churn
from simulations.loopback import COORDINATOR, Delivery, Loopback, Lossy, Parcel, Stop, floor_for, reliable
from tests.privacy.secure_aggregation.rostersum.looped import Tap, altering, at, decoded, exact, job, loop_of, losing

PARCEL = Parcel(0, COORDINATOR, bytes(range(100)))


def seeded(seed: int) -> Random:
    """Chance that can be repeated."""
    return Random(seed)  # noqa: S311 - a simulation's chance keeps no secret


def test_a_reliable_network_delivers_unchanged_and_in_order() -> None:
    """Each parcel once, all with one latency: nothing is overtaken."""
    assert reliable(PARCEL) == (Delivery(PARCEL),)


@pytest.mark.parametrize(
    ("network", "seen"),
    [
        (Lossy(seeded(1), drop=1.0), lambda found: found == ()),
        (Lossy(seeded(1), double=1.0), lambda found: len(found) == 2 and found[0] == found[1] == Delivery(PARCEL)),
        (Lossy(seeded(1), reorder=1.0), lambda found: found[0].parcel == PARCEL and found[0].seconds > 0.05),
        (Lossy(seeded(1), corrupt=1.0), lambda found: _bits(found[0].parcel) == 1),
        (Lossy(seeded(1)), lambda found: found == (Delivery(PARCEL),)),
    ],
    ids=["drop", "double", "reorder", "corrupt", "none"],
)
def test_a_lossy_network_does_what_it_is_told(network: Lossy, seen: Callable[[Sequence[Delivery]], bool]) -> None:
    """A probability of 1 happens always, of 0 never; a corrupted parcel differs in exactly one bit."""
    assert all(seen(network(PARCEL)) for _ in range(20))


def _bits(parcel: Parcel) -> int:
    changed = zip(parcel.content, PARCEL.content, strict=True)
    return sum((one ^ other).bit_count() for one, other in changed)


def test_a_step_gives_the_sum_over_its_members() -> None:
    """The words of the outcome are the exact sum, and the virtual clock, not the wall's, has moved."""
    loop = loop_of(job())

    outcome = loop.step(1, b"model")

    assert exact(loop, outcome)
    assert outcome.failures == ()
    assert 0 < loop.now < 5


def test_researchers_bring_their_own_vectors() -> None:
    """Whatever `contribute` gives is masked, sent and summed; the guard is part of it."""
    terms = job(words=8)
    key = loop_of(terms)._keys
    loop = Loopback(terms, key[0], key[1], lambda idx, _: np.array([idx, 10, 100, 1000, 1, 1, 1, 1], "<u4"))

    assert loop.step(1).sums[0].words.tolist() == [3, 30, 300, 3000, 3, 3, 3, 3]


def test_seeded_runs_repeat() -> None:
    """The same seed of a network and the same events give the same number of parcels and refusals."""

    def story() -> tuple[Counter[str], int]:
        loop = loop_of(job(), network=Lossy(seeded(3), double=0.3, reorder=0.3))
        tap = Tap(loop)
        loop.step(1)
        return Counter(type(decoded(parcel)).__name__ for parcel in tap.parcels), len(loop.refusals)

    assert story() == story()


def test_a_cut_line_loses_what_is_on_it() -> None:
    """What was under way when a line broke never arrives; after `join` the coordinator says it again."""
    loop = loop_of(job())
    tap = Tap(loop)
    loop.pass_time(5)
    loop.begin(1)
    assert loop.in_flight == 3

    loop.cut(1)
    assert loop.in_flight == 2
    loop.run(lambda: not loop.in_flight)
    assert tap.said(Ready, sender=1) == []

    loop.join(1)
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())
    assert len(tap.said(Train, receiver=1)) == 2


def test_a_stopped_party_forgets_its_memory_and_keeps_its_disk() -> None:
    """A site is another machine after `stop`, on the durable state that it had persisted."""
    loop = loop_of(job())
    at(loop, Stage.UPLOADING)
    before, disk = loop.sites[2], loop.disks[2]

    loop.stop(2, downtime=10.0)

    assert loop.sites[2] is None
    loop.pass_time(9.9)
    assert loop.sites[2] is None
    loop.pass_time(0.2)
    after = loop.sites[2]
    assert after is not None
    assert after is not before
    assert Durable.decode(loop.disks[2]).jobs[0].last == Durable.decode(disk).jobs[0].last
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())


@pytest.mark.parametrize(("when", "persisted"), [(Stop.BEFORE, False), (Stop.AFTER, True)])
def test_a_party_can_be_stopped_beside_any_effect(when: Stop, persisted: bool) -> None:  # noqa: FBT001 - a table's column
    """BEFORE: the effect is not performed, nor what follows; AFTER: it is, and what follows is not."""
    struck: list[Any] = []

    def interrupt(party: int, effect: object) -> Stop:
        if party == COORDINATOR and isinstance(effect, Persist) and effect.state.step is not None and not struck:
            struck.append(effect)
            return when
        return Stop.NOT

    loop = loop_of(job(), interrupt=interrupt)
    tap = Tap(loop)
    loop.pass_time(5)
    loop.begin(1)

    assert loop.coordinator is None
    assert not loop.idle
    assert tap.said(Train) == []
    assert (loop.disks[COORDINATOR] == struck[0].state.encode()) == persisted


def test_any_order_can_be_chosen() -> None:
    """`deliver` lets the newest thing happen first, time standing still."""
    loop = loop_of(job())
    loop.pass_time(5)
    loop.begin(1)

    loop.deliver(2)  # the TRAIN of site 2
    loop.deliver(0)  # its work, which is due before the other parcels arrive

    assert loop.now == 5
    assert loop.sites[2] is not None
    assert loop.sites[2].state(loop.terms.job_hash).value == "ready"
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())


def test_a_simulation_that_comes_to_rest_says_so() -> None:
    """Where nothing can happen any more, waiting for something is an error, not an endless loop."""
    loop = loop_of(job())

    with pytest.raises(LocalProtocolError, match="come to rest before what it was run for"):
        loop.run(lambda: False)


def test_corrupted_bytes_are_refused_by_whoever_gets_them() -> None:
    """What cannot be read is noted, and a site answers it with a REFUSE; the step opens without it."""
    changed: list[Parcel] = []

    def network(parcel: Parcel) -> Sequence[Delivery]:
        if parcel.receiver == 0 and not changed and type(decoded(parcel)) is messages.Keys:
            changed.append(parcel)
            parcel = replace(parcel, content=b"x" + parcel.content)
        return reliable(parcel)

    loop = loop_of(job(5, churn=Churn.OPEN, m_min=4, t=3), network=network)
    tap = Tap(loop)
    assert loop.step(1).sums != ()

    assert len(changed) == 1
    assert tap.said(Refuse, sender=0)[0].code is messages.Code.E_STATE
    assert [party for party, _ in loop.refusals][:1] == [0]


def test_what_the_coordinator_refuses_is_noted() -> None:
    """A message that breaks the protocol does not end the simulation; party and error are in `refusals`."""
    loop = loop_of(job(t=2), network=altering(Upload, lambda upload: replace(upload, seals=upload.seals[:1]), 1))
    at(loop, Stage.UPLOADING)
    loop.run(lambda: bool(loop.refusals))

    (party, error), *_ = loop.refusals
    assert party == COORDINATOR
    assert "one seal of 49 bytes for each other member" in str(error)


def test_a_vector_that_arrives_changed_does_not_arrive() -> None:
    """A payload is whole, with the promised digest, or it is not there: the attempt is given up."""

    def network(parcel: Parcel) -> Sequence[Delivery]:
        spoilt = replace(parcel, content=bytes(len(parcel.content)))
        return reliable(spoilt if parcel.payload and parcel.sender == 2 else parcel)

    loop = loop_of(job(), network=network)
    (failed,) = loop.step(1).failures

    assert (failed.reason, failed.who) == (Reason.ATTEMPTS, (2,))


def test_a_floor_that_refuses_the_job_ends_the_simulation() -> None:
    """A researcher's job that the sites' limits do not allow says why at once."""
    terms = job()
    floor = replace(floor_for(terms), c_max=2)

    with pytest.raises(LocalProtocolError, match="the job bears 1 colluding sites, this site asks for 2"):
        loop_of(terms, floor=floor)


def test_no_step_begins_without_a_coordinator() -> None:
    """While the coordinator is stopped nothing can be begun, and a plan that does not exist is refused."""
    loop = loop_of(job(), network=losing())
    loop.pass_time(5)
    with pytest.raises(LocalProtocolError, match="the job has no plan 4"):
        loop.begin(4)
    loop.stop(COORDINATOR)

    with pytest.raises(LocalProtocolError, match="the coordinator is stopped"):
        loop.begin(1)


def test_what_is_not_words_needs_an_encoding() -> None:
    """An update of real numbers is summed only where it is said how: nothing is converted in silence."""
    terms = job(3)
    loop = loop_of(terms, contribute=lambda *_: np.zeros(12, np.float32))
    with pytest.raises(LocalProtocolError, match="a vector of float32 was contributed, and nothing says how"):
        loop.step(1)
