from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.records import Outcome, Share
from coordinator.round import (
    Contributed,
    DeadlinePassed,
    PayloadRefused,
    Round,
    RoundEvent,
    RoundState,
    SealedRound,
    SiteDeclined,
)
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.messages import DeclineCause

LENGTH = 40
COHORT = ("athens", "berlin", "cork")


def contributed(site: str, content: str = "update", length: int = LENGTH, weight: float = 1.0) -> Contributed:
    """A payload that the site's name and `content` name."""
    return Contributed(site, BlobRef(BlobRef.of(f"{site} {content}".encode()).digest, length), weight, 2.5)


def opened(*events: RoundEvent, needed: int = 2, cohort: tuple[str, ...] = COHORT) -> Round:
    """An attempt of three sites that has seen `events`."""
    attempt = Round(frozenset(cohort), needed, LENGTH)
    for event in events:
        attempt.receive(event)
    return attempt


def memory(attempt: Round) -> tuple[object, ...]:
    """All that an attempt knows."""
    return attempt.state, attempt.counted, attempt.outstanding, attempt.shares({})


def refused(attempt: Round, event: RoundEvent) -> str:
    """The words with which the event is refused; nothing has changed."""
    before = memory(attempt)
    with pytest.raises(RemoteProtocolError) as refusal:
        attempt.receive(event)
    assert memory(attempt) == before
    return str(refusal.value)


def test_closes_when_all_have_answered_and_enough_count() -> None:
    """The last answer of the cohort closes the round; a decline is an answer."""
    attempt = opened(contributed("athens"), contributed("cork"))
    assert attempt.state is RoundState.COLLECTING
    assert attempt.outstanding == {"berlin"}

    attempt.receive(SiteDeclined("berlin", DeclineCause.DATA))

    assert attempt.state is RoundState.CLOSED
    assert [each.site for each in attempt.counted] == ["athens", "cork"]


def test_fails_when_all_have_answered_and_too_few_count() -> None:
    """Two declines of three leave one contribution where two are needed."""
    attempt = opened(
        SiteDeclined("athens", DeclineCause.DATA), contributed("berlin"), SiteDeclined("cork", DeclineCause.POLICY)
    )

    assert attempt.state is RoundState.FAILED


def test_what_counts_stands_in_the_order_of_names() -> None:
    """Sums over the counted are the same on every run, whoever was first."""
    first = opened(*(contributed(site) for site in COHORT))
    second = opened(*(contributed(site) for site in reversed(COHORT)))

    assert first.counted == second.counted


def test_the_same_contribution_again_is_harmless() -> None:
    """A site that re-sends after a reconnect is counted once, before and after the round has closed."""
    attempt = opened(contributed("athens"), contributed("athens"))
    assert attempt.outstanding == {"berlin", "cork"}

    for event in (contributed("berlin"), contributed("cork"), contributed("athens")):
        attempt.receive(event)

    assert attempt.state is RoundState.CLOSED
    assert len(attempt.counted) == 3


@pytest.mark.parametrize(
    "second",
    [
        contributed("athens", "another update"),
        contributed("athens", weight=1000.0),
        SiteDeclined("athens", DeclineCause.CANCELLED),
    ],
    ids=["payload", "weight", "decline"],
)
def test_a_second_answer_is_refused(second: RoundEvent) -> None:
    """A site's first answer stands: another payload, another weight or a decline changes nothing."""
    told = refused(opened(contributed("athens")), second)

    assert told == "site athens has answered this step already; its first answer stands"


def test_a_contribution_after_a_decline_is_refused() -> None:
    """A site that declined is not counted after all."""
    told = refused(opened(SiteDeclined("athens", DeclineCause.RESOURCES)), contributed("athens"))

    assert "has answered this step already" in told


@pytest.mark.parametrize(
    "event", [contributed("dublin"), SiteDeclined("dublin", DeclineCause.DATA)], ids=["contribution", "decline"]
)
def test_a_site_that_was_not_asked_is_refused(event: RoundEvent) -> None:
    """Only the cohort is heard."""
    assert refused(opened(), event) == "site dublin was not asked to take part in this step"


def test_a_payload_of_another_length_is_refused() -> None:
    """The site is named with both lengths and what to do, and may still send the right one."""
    attempt = opened()

    told = refused(attempt, contributed("berlin", length=LENGTH + 4))

    assert "site berlin contributed 44 bytes where this step takes 40" in told
    assert "update Parley at berlin" in told
    assert attempt.expects("berlin")


def test_a_late_contribution_is_refused_as_late() -> None:
    """A site that the deadline passed by is told that the step has closed, not that it has answered already."""
    attempt = opened(contributed("athens"), contributed("berlin"), DeadlinePassed())

    assert not attempt.answered("cork")
    assert refused(attempt, contributed("cork")) == "site cork answered after the step had closed"


def test_the_deadline_closes_with_a_quorum() -> None:
    """Who has not answered by then is late; the others count."""
    attempt = opened(contributed("athens"), contributed("berlin"), DeadlinePassed())

    assert attempt.state is RoundState.CLOSED
    assert [each.site for each in attempt.counted] == ["athens", "berlin"]


def test_the_deadline_fails_without_a_quorum() -> None:
    """One contribution where two are needed is none."""
    attempt = opened(contributed("athens"), DeadlinePassed())

    assert attempt.state is RoundState.FAILED
    assert attempt.outstanding == frozenset()


def test_a_deadline_after_the_close_changes_nothing() -> None:
    """The clock does not make late who has answered."""
    attempt = opened(*(contributed(site) for site in COHORT))
    before = memory(attempt)

    attempt.receive(DeadlinePassed())

    assert memory(attempt) == before


def test_a_payload_refused_at_summing_no_longer_counts() -> None:
    """With enough left the round stays closed, with too few it fails."""
    attempt = opened(*(contributed(site) for site in COHORT))

    attempt.receive(PayloadRefused("berlin", "its values are not finite"))
    assert attempt.state is RoundState.CLOSED
    assert [each.site for each in attempt.counted] == ["athens", "cork"]

    attempt.receive(PayloadRefused("cork", "its values are not finite"))
    assert attempt.state is RoundState.FAILED


@pytest.mark.parametrize("answers", [[contributed("athens")], [contributed("athens"), DeadlinePassed()]])
@pytest.mark.parametrize("site", ["athens", "cork"])
def test_refusing_a_payload_that_no_sum_counts_is_a_bug_of_ours(answers: list[RoundEvent], site: str) -> None:
    """Nothing is taken back that was never counted, nor before the round has closed or after it failed."""
    attempt = opened(*answers)
    before = memory(attempt)

    with pytest.raises(LocalProtocolError, match=f"the payload of {site} was refused, and no sum counts it"):
        attempt.receive(PayloadRefused(site, "its values are not finite"))

    assert memory(attempt) == before


def test_shares_tell_what_became_of_each_site() -> None:
    """Counted, declined, refused and late sites stand by name with causes, seconds and the bytes that moved."""
    attempt = opened(
        contributed("athens"),
        contributed("berlin"),
        SiteDeclined("cork", DeclineCause.RESOURCES),
        DeadlinePassed(),
        PayloadRefused("berlin", "its values are not finite"),
        needed=1,
        cohort=(*COHORT, "dublin"),
    )

    assert attempt.shares({"athens": 120, "dublin": 80}) == (
        Share("athens", Outcome.COUNTED, "", 2.5, 120),
        Share("berlin", Outcome.REFUSED, "its values are not finite"),
        Share("cork", Outcome.DECLINED, "resources"),
        Share("dublin", Outcome.LATE, "did not answer before the deadline", 0.0, 80),
    )


def test_a_payload_is_expected_until_the_site_has_answered() -> None:
    """Uploads are taken from asked sites that have not answered, and from nobody once the round has closed."""
    attempt = opened(contributed("athens"))
    assert [attempt.expects(site) for site in (*COHORT, "dublin")] == [False, True, True, False]

    attempt.receive(contributed("berlin"))
    attempt.receive(DeadlinePassed())

    assert not any(attempt.expects(site) for site in COHORT)


class Model(RuleBasedStateMachine):
    """A round beside the plainest description of one: who counts with what, who is out, and whether time is up."""

    sites = st.sampled_from((*COHORT, "dublin", "outsider"))

    @initialize(needed=st.integers(1, 4))
    def begin(self, needed: int) -> None:
        """Four sites are asked."""
        self.cohort = frozenset((*COHORT, "dublin"))
        self.needed = needed
        self.round = Round(self.cohort, needed, LENGTH)
        self.counts: dict[str, Contributed] = {}
        self.out: dict[str, Outcome] = {}

    @property
    def open(self) -> bool:
        """Whether anybody's answer is waited for."""
        return bool(self.cohort - self.counts.keys() - self.out.keys())

    def takes(self, site: str) -> bool:
        """Whether an answer of this site would be its first, and in time."""
        return site in self.cohort and site not in self.counts and site not in self.out

    def hand_in(self, event: RoundEvent, apply: Callable[[], None] | None) -> None:
        """Both take the event in, or (with no `apply`) the round refuses it and keeps its memory."""
        if apply is None:
            refused(self.round, event)
        else:
            self.round.receive(event)
            apply()

    @rule(
        site=sites,
        content=st.sampled_from(("one", "two")),
        weight=st.sampled_from((1.0, 2.0)),
        length=st.sampled_from((LENGTH, LENGTH, LENGTH, LENGTH - 1)),
    )
    def contribute(self, site: str, content: str, weight: float, length: int) -> None:
        """A site contributes: its first payload of the right length counts, the same again is harmless."""
        event = contributed(site, content, length, weight)
        if self.counts.get(site) == event:
            self.hand_in(event, lambda: None)
        elif self.takes(site) and length == LENGTH:
            self.hand_in(event, lambda: self.counts.update({site: event}))
        else:
            self.hand_in(event, None)

    @rule(site=sites, cause=st.sampled_from(DeclineCause))
    def decline(self, site: str, cause: DeclineCause) -> None:
        """A site declines, once."""
        apply = (lambda: self.out.update({site: Outcome.DECLINED})) if self.takes(site) else None
        self.hand_in(SiteDeclined(site, cause), apply)

    @rule()
    def deadline(self) -> None:
        """Time is up: whoever is waited for is late."""
        self.round.receive(DeadlinePassed())
        self.out |= dict.fromkeys(self.cohort - self.counts.keys() - self.out.keys(), Outcome.LATE)

    @rule(site=sites)
    def refuse_payload(self, site: str) -> None:
        """Summing, which only closed rounds see, cannot use a payload."""
        if self.round.state is RoundState.CLOSED and site in self.counts:
            self.round.receive(PayloadRefused(site, "not finite"))
            del self.counts[site]
            self.out[site] = Outcome.REFUSED

    @invariant()
    def agree(self) -> None:
        """Both know the same."""
        enough = RoundState.CLOSED if len(self.counts) >= self.needed else RoundState.FAILED
        assert self.round.state is (RoundState.COLLECTING if self.open else enough)
        assert {each.site: each for each in self.round.counted} == self.counts
        assert self.round.outstanding == self.cohort - self.counts.keys() - self.out.keys()
        told = {share.site: share.outcome for share in self.round.shares({})}
        assert told == self.out | dict.fromkeys(self.counts, Outcome.COUNTED)


TestModel = Model.TestCase
TestModel.settings = settings(deadline=None, max_examples=50, stateful_step_count=20)


# -------------------------------------------------------------------------------------------------------- sealed sums


def sealed() -> SealedRound:
    """An attempt of three sites under secure aggregation."""
    return SealedRound(frozenset(COHORT))


def test_only_its_machine_closes_a_sealed_round() -> None:
    """Declines of all leave it collecting; once the sum is open, exactly its members are counted."""
    attempt = sealed()
    for site in COHORT:
        attempt.receive(SiteDeclined(site, DeclineCause.DATA))
    assert attempt.state is RoundState.COLLECTING

    attempt.opened(frozenset({"athens", "cork", "dublin"}))

    assert attempt.state is RoundState.CLOSED
    assert attempt.counted == ()
    assert attempt.shares({"cork": 7}) == (
        Share("athens", Outcome.COUNTED),
        Share("berlin", Outcome.DECLINED, "data"),
        Share("cork", Outcome.COUNTED, bytes=7),
        Share("dublin", Outcome.COUNTED),
    )


def test_a_site_whose_group_has_no_sum_is_told_so() -> None:
    """What is known of why stands beside it, unless it declined itself."""
    attempt = sealed()
    attempt.receive(SiteDeclined("cork", DeclineCause.DATA))

    attempt.opened(frozenset({"athens"}), (("berlin", "its group has no sum"), ("cork", "its group has no sum")))

    assert attempt.shares({}) == (
        Share("athens", Outcome.COUNTED),
        Share("berlin", Outcome.LATE, "its group has no sum"),
        Share("cork", Outcome.DECLINED, "data"),
    )


def test_a_sealed_round_says_who_holds_it_back_and_why() -> None:
    """Nobody while all are waited for alike; then the sites behind, but for those that declined."""
    attempt = sealed()
    assert attempt.holding == (frozenset(), "")

    attempt.stands(frozenset({"berlin", "cork"}), "to upload", (("cork", "declined this step"),))

    assert attempt.holding == ({"berlin"}, "to upload")
    assert attempt.outstanding == {"berlin"}
    assert attempt.answered("cork")
    attempt.failed("too few sites are ready: berlin", broken=False)
    assert attempt.outstanding == frozenset()
    assert attempt.shares({}) == (
        Share("athens", Outcome.LATE),
        Share("berlin", Outcome.LATE, "the sum was given up, which waited for it"),
        Share("cork", Outcome.DECLINED, "declined this step"),
    )


def test_the_first_reason_that_a_site_is_missing_stands() -> None:
    """A site that was paused declines to its machine as well: that is no second reason."""
    attempt = sealed()
    attempt.receive(SiteDeclined("berlin", DeclineCause.PAUSED))
    attempt.receive(SiteDeclined("berlin", DeclineCause.DATA))
    attempt.stands(frozenset(), "", (("berlin", "declined this step"),))

    assert attempt.shares({})[1] == Share("berlin", Outcome.DECLINED, "paused")


def test_a_sealed_round_asks_whoever_comes_while_it_collects() -> None:
    """A newcomer joins the cohort, one that declined is asked anew; after the end nobody is."""
    attempt = sealed()
    attempt.receive(SiteDeclined("berlin", DeclineCause.PAUSED))

    assert attempt.asks("dublin")
    assert attempt.asks("berlin")
    assert attempt.cohort == {*COHORT, "dublin"}
    assert attempt.expects("berlin")

    attempt.failed("the sum did not hold its checks", broken=True)
    assert attempt.broken == "the sum did not hold its checks"
    assert not attempt.asks("dublin")
    assert not attempt.expects("berlin")


def test_a_sealed_round_takes_nothing_in_plain() -> None:
    """No payload, no contribution, no deadline; a stranger's decline is refused. Nothing changes."""
    attempt = sealed()
    assert not attempt.takes("athens", contributed("athens").payload)
    for event, words in (
        (contributed("athens"), "site athens contributed in plain to a step that is summed under secure aggregation"),
        (SiteDeclined("dublin", DeclineCause.DATA), "site dublin was not asked to take part in this step"),
    ):
        with pytest.raises(RemoteProtocolError, match=words):
            attempt.receive(event)
    for mistake in (DeadlinePassed(), PayloadRefused("athens", "not finite")):
        with pytest.raises(LocalProtocolError, match="came for a sealed sum"):
            attempt.receive(mistake)
    assert attempt.shares({}) == sealed().shares({})
