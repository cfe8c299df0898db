from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from privacy.crypto import canonical, seal
from privacy.secure_aggregation.rostersum import rules, site_events
from privacy.secure_aggregation.rostersum.coordinator import Patience
from privacy.secure_aggregation.rostersum.durable import Durable, Job
from privacy.secure_aggregation.rostersum.messages import Open, Outcome, Rescue, Result, RoundStart, Shares, Upload
from privacy.secure_aggregation.rostersum.site_events import Resumed
from privacy.secure_aggregation.rostersum.terms import Churn, Plan
from simulations.loopback import COORDINATOR, Loopback
from tests.privacy.secure_aggregation.rostersum.looped import Tap, decoded, exact, job, loop_of, total

# ---------------------------------------------------------------------------------------------------- I7, exhaustively

Bits = npt.NDArray[np.int64]


def _count(sets: Bits, of: int) -> Bits:
    """How many of the sites in the bit set `of` each set holds."""
    return np.array([int(each & of).bit_count() for each in sets.ravel()], np.int64).reshape(sets.shape)


def opens_twice(n: int, c: int, rho: int, m_min: int, t: int, *, disjoint: bool = False) -> bool:
    """Whether a coordinator with `c` colluding and `rho` rolled-back sites can open two attempts of one round.

    The model of section 5.2, for all pairs of sets, equal ones too. An honest site that opened the first attempt does
    not upload in the second, and all honest members of the second must upload there; a colluding or rolled-back site
    does both. The first is open when each honest member opened it, or its seed has `t` shares with those who did or who
    collude.
    `disjoint`: only pairs of sets without a common honest site are looked at.
    """
    sets = np.array([each for each in range(1 << n) if each.bit_count() >= m_min], np.int64)
    bad = (1 << (c + rho)) - 1
    honest = ((1 << n) - 1) & ~bad
    first, second = np.meshgrid(sets, sets, indexing="ij")
    shut = _count(first & second, honest)  # honest sites that go on to the second attempt cannot open the first
    holders = _count(first, bad) + _count(first & ~second, honest)
    opened = (shut == 0) | ((t > 0) & (holders >= t))
    return bool(np.any(opened & ((shut == 0) == disjoint)))


def numbers(n: int) -> Iterator[tuple[int, int, int, int]]:
    """Each (c, rho, m_min, t) that a job of `n` sites can have, t > 0, and 0 to 2 rolled-back sites."""
    for c in range(n - 1):
        for rho, m_min in product(range(min(3, n - c)), range(max(3, c + 2), n + 1)):
            for t in range(1, m_min):
                yield c, rho, m_min, t


def _two_honest(n: int, c: int, rho: int, m_min: int) -> bool:
    """Whether each set has two sites that neither collude nor were rolled back: with fewer nothing is hidden."""
    return m_min >= c + rho + 2 and n > c + rho


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7])
def test_the_escrow_condition_is_exact(n: int) -> None:
    """I7, exhaustive: with t > 0 two sums that share an honest site can open iff t + m_min <= n + c + rolled back."""
    for c, rho, m_min, t in numbers(n):
        if _two_honest(n, c, rho, m_min):
            assert opens_twice(n, c, rho, m_min, t) == (t + m_min <= n + c + rho), (c, rho, m_min, t)


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7])
def test_at_most_one_sum_opens_with_escrow(n: int) -> None:
    """G1: under the condition no second sum opens at all, not even over other honest sites."""
    for c, rho, m_min, t in numbers(n):
        if t + m_min > n + c + rho and _two_honest(n, c, rho, m_min):
            assert not opens_twice(n, c, rho, m_min, t, disjoint=True), (c, rho, m_min, t)


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7])
def test_without_escrow_no_two_sums_share_an_honest_site(n: int) -> None:
    """G1 for t = 0, whatever c: two sums may open, over sets without a common honest site."""
    for c, m_min in product(range(n - 1), range(1, n + 1)):
        assert not opens_twice(n, c, 0, m_min, 0)


# ------------------------------------------------------------------------------------- I7, a malicious coordinator


class Adversary:
    """A coordinator that signs what it likes, with site 0 on its side, against the sites' real machines."""

    def __init__(self, bench: Any, t: int) -> None:
        self.bench = bench
        self.t = t
        self.attempts: dict[bytes, RoundStart] = {}
        self.uploads: dict[bytes, tuple[Upload, ...]] = {}
        self.seeds: dict[bytes, set[int]] = {}
        self.shares: dict[bytes, dict[int, set[int]]] = {}

    def attempt(self, a: int, members: tuple[int, ...]) -> None:
        """Tries this attempt: whoever accepts it uploads, and site 0 tells all it knows of it."""
        start = self.bench.start(1, a, members)
        found = []
        for idx in members:
            masks = self.bench.of(self.bench.say(idx, start), site_events.Mask)
            if masks:
                found.append(self.bench.mask(idx, masks[0]))
        if len(found) < len(members):
            return
        ctx = start.ctx
        self.attempts[ctx], self.uploads[ctx] = start, tuple(found)
        self.seeds[ctx] = {0} & set(members)
        self.shares[ctx] = {idx: set() for idx in members}
        if 0 in members:
            self._betrayed(ctx)

    def _betrayed(self, ctx: bytes) -> None:
        """Site 0 opens the seals that the others closed for it, without any FULL."""
        attempt = self.bench.sites[0]._seats[self.bench.job_hash]._attempt
        for upload in self.uploads[ctx]:
            for each in upload.seals:
                if each.idx == 0:
                    associated = canonical.enc(ctx, upload.idx, 0, upload.commitment)
                    if seal.open(attempt.inbound[upload.idx], associated, each.sealed):
                        self.shares[ctx][upload.idx].add(0)

    def full(self, ctx: bytes, idx: int) -> None:
        """Shows a site the FULL of an attempt."""
        if idx in self.attempts[ctx].members:
            said = self.bench.sent(self.bench.say(idx, self.bench.full(idx, self.uploads[ctx])), Open)
            self.seeds[ctx].update(message.idx for message in said if message.ctx == ctx)

    def rescue(self, ctx: bytes, idx: int) -> None:
        """Asks a site for every share of an attempt that it would give."""
        members = self.attempts[ctx].members
        for v in set(members) - {idx}:
            message = self.bench.sign(Rescue(ctx, (v,)))
            for shares in self.bench.sent(self.bench.say(idx, message), Shares):
                for share in shares.shares:
                    self.shares[ctx][share.idx].add(idx)

    def opened(self) -> list[frozenset[int]]:
        """The sets whose sums it can compute."""
        return [
            frozenset(start.members)
            for ctx, start in self.attempts.items()
            if all(idx in self.seeds[ctx] or 0 < self.t <= len(self.shares[ctx][idx]) for idx in start.members)
        ]


def plan_of(train: Plan, m_min: int, t: int) -> Plan:
    """A plan of churn "open" with these thresholds."""
    return replace(train, churn=Churn.OPEN, m_min=m_min, t=t)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([(4, 3, 0), (4, 4, 2), (5, 4, 3), (5, 3, 0), (5, 5, 2)]), st.data())
def test_no_schedule_opens_two_sums_of_one_round(
    bench: Callable[..., Any], train: Plan, kind: tuple[int, int, int], data: st.DataObject
) -> None:
    """I7 on the real machines: whatever sets, FULLs and RESCUEs a malicious coordinator tries in whatever order."""
    n, m_min, t = kind
    desk = bench(n, (plan_of(train, m_min, t),))
    desk.train(1)
    adversary = Adversary(desk, t)
    sites = tuple(range(n))
    sets = [each for size in range(m_min, n + 1) for each in combinations(sites, size)]

    for a in range(data.draw(st.integers(2, 4))):
        adversary.attempt(a, data.draw(st.sampled_from(sets)))
        for ctx in list(adversary.attempts):
            for idx in data.draw(st.permutations(sites))[: data.draw(st.integers(0, n))]:
                adversary.full(ctx, idx)
    for ctx, idx in product(adversary.attempts, sites):
        adversary.full(ctx, idx)
        adversary.rescue(ctx, idx)

    opened = adversary.opened()
    assert t == 0 or len(opened) <= 1
    assert all(first & second <= {0} for first, second in combinations(opened, 2))


def test_one_share_below_the_condition_opens_twice(bench: Callable[..., Any], train: Plan) -> None:
    """I7, sharp: t + m_min = n + c is refused by every site, and sites made to take it open two sums that share one."""
    desk = bench(4, (plan_of(train, 3, 2),), ready=False)
    terms = desk.terms
    assert [each.rule for each in rules.broken(terms)] == [rules.Rule.ESCROW]
    for idx in range(4):
        taken = Job(terms.job_hash, idx, terms.encode(), desk.data.family, desk.data.table)
        desk.sites[idx] = desk.started(idx, Durable(jobs=(taken,)))
    desk.epoch()
    desk.train(1)
    adversary = Adversary(desk, 2)

    adversary.attempt(0, (0, 1, 2))
    adversary.full(next(iter(adversary.attempts)), 1)
    adversary.rescue(next(iter(adversary.attempts)), 1)
    adversary.attempt(1, (0, 2, 3))
    for idx in (2, 3):
        adversary.full(list(adversary.attempts)[1], idx)

    assert adversary.opened() == [frozenset({0, 1, 2}), frozenset({0, 2, 3})]


# ----------------------------------------------------------------------------------------------------------------- I12

Row = dict[Any, int]


def _uploaded(members: Iterable[int], tag: int) -> list[Row]:
    """What each member's vector is, in terms of inputs, self masks and pair masks of context `tag`."""
    members = tuple(members)
    rows = []
    for i in members:
        row: Row = {("x", i): 1, ("b", tag, i): 1}
        row.update({("s", tag, min(i, j), max(i, j)): 1 if i < j else -1 for j in members if j != i})
        rows.append(row)
    return rows


def _revealed(members: Iterable[int], tag: int, opened: Iterable[int], bad: Iterable[int]) -> list[Row]:
    """What is known besides: opened self masks, all masks and inputs of colluding members."""
    members, known = tuple(members), set(bad)
    rows: list[Row] = [{("b", tag, i): 1} for i in set(opened) | known]
    rows += [{("x", i): 1} for i in known]
    rows += [{("s", tag, i, j): 1} for i, j in combinations(members, 2) if known & {i, j}]
    return rows


def leaked(rows: list[Row], sites: Iterable[int], known: list[set[int]]) -> bool:
    """Whether the rows determine more of the inputs than the sums over the sets `known`: ranks over the rationals."""
    names = sorted({name for row in rows for name in row}, key=str)
    inputs = [names.index(("x", i)) for i in sites if ("x", i) in names]
    matrix = np.array([[row.get(name, 0) for name in names] for row in rows])
    masks = np.delete(matrix, inputs, axis=1)
    learnt = np.linalg.matrix_rank(matrix) - (np.linalg.matrix_rank(masks) if masks.size else 0)
    sums = np.array([[1 if names[column] in {("x", i) for i in each} else 0 for column in inputs] for each in known])
    return bool(learnt != (np.linalg.matrix_rank(sums) if sums.size else 0))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_but_one_openings_tell_nothing(n: int) -> None:
    """I12, over all reveal patterns: unless every honest member opened, nothing of their inputs is determined."""
    sites = tuple(range(n))
    for c in range(n - 1):
        bad, honest = sites[:c], sites[c:]
        for size in range(len(honest) + 1):
            for opened in combinations(honest, size):
                rows = _uploaded(sites, 0) + _revealed(sites, 0, opened, bad)
                sums: list[set[int]] = [{i} for i in bad] + ([set(honest)] if size == len(honest) else [])
                assert not leaked(rows, sites, sums), (c, opened)


def test_two_contexts_with_equal_inputs_tell_their_opened_sums_only() -> None:
    """I12: four sites, two attempts with the same inputs: what is determined is spanned by the sums that opened."""
    sites = (0, 1, 2, 3)
    for first, second in product([(0, 1, 2), (0, 1, 2, 3)], [(1, 2, 3), (0, 1, 2, 3)]):
        for one in _subsets(set(first) - {0}):
            for two in _subsets(set(second) - {0}):
                rows = _uploaded(first, 0) + _revealed(first, 0, one, {0} & set(first))
                rows += _uploaded(second, 1) + _revealed(second, 1, two, {0} & set(second))
                sums = [{0}]
                sums += [set(first) - {0}] if one == set(first) - {0} else []
                sums += [set(second) - {0}] if two == set(second) - {0} else []
                assert not leaked(rows, sites, sums), (first, second, one, two)


def test_the_rank_test_sees_a_leak() -> None:
    """The proof's own test: were one site's pair masks told with all self masks, its input would be determined."""
    sites = (0, 1, 2)
    rows = _uploaded(sites, 0) + _revealed(sites, 0, sites, ())
    assert not leaked(rows, sites, [set(sites)])
    assert not leaked([*rows, {("s", 0, 0, 1): 1}], sites, [set(sites)])
    assert leaked([*rows, {("s", 0, 0, 1): 1}, {("s", 0, 0, 2): 1}], sites, [set(sites)])


def _subsets(of: set[int]) -> list[set[int]]:
    return [set(each) for size in range(len(of) + 1) for each in combinations(sorted(of), size)]


# --------------------------------------------------------------------------------------- any interleaving, I1, I7, I14


class Interleavings(RuleBasedStateMachine):
    """Everything under way may happen in any order, sites and coordinator may die and come back at any moment."""

    loop: Loopback
    tap: Tap

    @initialize(kind=st.sampled_from([(3, 3, 0), (3, 3, 2), (4, 4, 2), (5, 4, 3)]))
    def made(self, kind: tuple[int, int, int]) -> None:
        """A job of 3 to 5 sites whose coordinator is not patient."""
        n, m_min, t = kind
        churn = Churn.CELLS if m_min == n else Churn.OPEN
        patience = Patience(ready=60, again=30, upload=60, opening=30)
        self.loop = loop_of(job(n, churn=churn, m_min=m_min, t=t), patience=patience)
        self.tap = Tap(self.loop)
        self.sums: list[tuple[int, tuple[int, ...]]] = []

    @rule()
    def begin(self) -> None:
        """A step begins, if none is under way."""
        if self.loop.idle:
            self.loop.begin(1, b"model")

    @precondition(lambda self: self.loop.in_flight)
    @rule(which=st.integers(0, 30), times=st.integers(1, 8))
    def deliver(self, which: int, times: int) -> None:
        """Some of what is under way happens, out of its order."""
        for _ in range(times):
            if self.loop.in_flight:
                self.loop.deliver(which)

    @rule(seconds=st.sampled_from([0.2, 5.0, 40.0, 100.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, in order."""
        self.loop.pass_time(seconds)

    @rule(idx=st.integers(0, 4))
    def kill_site(self, idx: int) -> None:
        """A site dies and starts again from its disk."""
        if idx < self.loop.terms.n and self.loop.sites[idx] is not None:
            self.loop.stop(idx)

    @rule()
    def kill_coordinator(self) -> None:
        """The coordinator dies and starts again from its disk."""
        if self.loop.coordinator is not None:
            self.loop.stop(COORDINATOR)

    @rule(idx=st.integers(0, 4))
    def reconnect(self, idx: int) -> None:
        """A line breaks, with all that was on it, and is there again."""
        if idx < self.loop.terms.n and self.loop.coordinator is not None:
            self.loop.cut(idx)
            self.loop.join(idx)

    @invariant()
    def sums_are_exact(self) -> None:
        """I1: whatever opened is the exact sum of its round over its members."""
        standing = self.loop.coordinator.standing if self.loop.coordinator is not None else None
        for each in self.loop.outcome().sums:
            assert standing is None or each.words.tolist() in [
                total(self.loop.terms, each.members, r) for r in range(1, standing.r + 1)
            ]

    def teardown(self) -> None:
        """Nothing was signed twice differently, one sum opened for each round; and the job goes on."""
        if not hasattr(self, "loop"):
            return
        loop = self.loop
        loop.pass_time(4 * 3600)
        self._judge()
        for idx, site in enumerate(loop.sites):
            if site is not None:
                loop._tell_site(idx, Resumed(loop.terms.job_hash))
                loop.cut(idx)
                loop.join(idx)
        loop.pass_time(5)
        outcome = loop.step(1, b"the last")
        assert exact(loop, outcome), outcome

    def _judge(self) -> None:
        said = [(parcel, decoded(parcel)) for parcel in self.tap.parcels]
        starts = {(parcel.receiver, m.r, m.a): set() for parcel, m in said if isinstance(m, RoundStart)}
        uploads: dict[tuple[bytes, int], set[bytes]] = {}
        opens: dict[tuple[int, int], set[Open]] = {}
        rounds = {m.ctx: m.r for _, m in said if isinstance(m, RoundStart)}
        opened: dict[int, set[bytes]] = {}
        for parcel, message in said:
            match message:
                case RoundStart():
                    starts[parcel.receiver, message.r, message.a].add(message)
                case Upload():
                    uploads.setdefault((message.ctx, message.idx), set()).add(message.y_hash)
                case Open():
                    opens.setdefault((rounds[message.ctx], message.idx), set()).add(message)
                case Result(outcome=Outcome.OPENED):
                    opened.setdefault(rounds[message.ctx], set()).add(message.ctx)
                case _:
                    pass
        for story in (starts, uploads, opens, opened):
            assert all(len(each) == 1 for each in story.values()), story


Interleavings.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=30)
test_any_interleaving_opens_exact_sums_and_contradicts_nothing = Interleavings.TestCase
