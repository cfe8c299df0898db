"""No order of events makes an attempt count a site twice, forget an answer, or change its mind without saying so."""

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.round import Contributed, DeadlinePassed, PayloadRefused, Round, RoundEvent, RoundState, SiteDeclined
from federation.blobs import BlobRef
from federation.messages import DeclineCause
from tests.fuzz.profiles import budget
from tests.fuzz.snapshot import refusal, snapshot

SITES = ("athens", "berlin", "cork", "dublin")
LENGTH = 40

sites = st.sampled_from((*SITES, "outsider"))
payloads = st.builds(
    BlobRef, st.sampled_from((bytes(32), b"x" * 32)), st.sampled_from((LENGTH, LENGTH, LENGTH, 0, LENGTH + 1))
)


class Attempt(RuleBasedStateMachine):
    """An attempt that hears anything from anybody at any time."""

    @initialize(cohort=st.sampled_from((SITES, SITES[:3], SITES[:1], ())), needed=st.integers(0, 4))
    def begin(self, cohort: tuple[str, ...], needed: int) -> None:
        """Some of the sites are asked."""
        self.round = Round(frozenset(cohort), needed, LENGTH)
        self.first: dict[str, Contributed] = {}
        self.out: set[str] = set()

    @rule(event=st.builds(Contributed, sites, payloads, st.sampled_from((1.0, 2.0)), st.sampled_from((0.0, 1.0))))
    def contribute(self, event: Contributed) -> None:
        """A site, or nobody's, sends a payload, or the same again."""
        self.happen(event)

    @rule(event=st.builds(SiteDeclined, sites, st.sampled_from(DeclineCause)))
    def decline(self, event: SiteDeclined) -> None:
        """A site declines."""
        self.happen(event)

    @rule(event=st.builds(PayloadRefused, sites, st.just("not finite")))
    def refuse(self, event: PayloadRefused) -> None:
        """A payload is said not to be one."""
        self.happen(event)

    @rule()
    def end(self) -> None:
        """The time is over, perhaps again."""
        self.happen(DeadlinePassed())

    def happen(self, event: RoundEvent) -> None:
        """Whatever is refused changed nothing; a site's first answer stands; who is out stays out."""
        before = snapshot(self.round)
        state = self.round.state
        if refused := refusal(lambda: self.round.receive(event)):
            assert getattr(event, "site", "") in refused.problem
            assert snapshot(self.round) == before
            return
        assert state is RoundState.COLLECTING or self.round.state is not RoundState.COLLECTING
        assert state is not RoundState.FAILED or self.round.state is RoundState.FAILED
        for each in self.round.counted:
            assert self.first.setdefault(each.site, each) == each
        assert self.out <= {share.site for share in self.round.shares({})} - {each.site for each in self.round.counted}
        self.out = {share.site for share in self.round.shares({})} - {each.site for each in self.round.counted}

    @invariant()
    def hold(self) -> None:
        """The answers and the state are those of one attempt at the sites asked."""
        counted = [each.site for each in self.round.counted]
        shares = [share.site for share in self.round.shares({})]
        assert len(set(counted)) == len(counted)
        assert len(set(shares)) == len(shares)
        assert set(counted) <= set(shares) <= self.round.cohort
        assert self.round.outstanding == self.round.cohort - set(shares)
        assert all(each.payload.length == LENGTH for each in self.round.counted)
        assert all(self.round.expects(site) for site in self.round.outstanding)
        match self.round.state:
            case RoundState.CLOSED:
                assert not self.round.outstanding
                assert len(counted) >= self.round.needed
            case RoundState.FAILED:
                assert not self.round.outstanding
                assert len(counted) < self.round.needed

    def teardown(self) -> None:
        """Time ends every attempt."""
        target(len(self.first), label="sites that counted")
        self.round.receive(DeadlinePassed())
        assert self.round.state is not RoundState.COLLECTING


TestAttempt = Attempt.TestCase
TestAttempt.settings = budget(40)
