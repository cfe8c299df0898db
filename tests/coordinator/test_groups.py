"""Whole jobs in groups over real mutual TLS: each group's sum is one voice, and a robust strategy hears them all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator.records import Outcome
from federation.errors import ConfigurationError
from federation.messages import DeclineCause, JobEnded, JobState, Role, StepKind
from federation.vector import from_safetensors
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.messages import Open, Result, RoundStart, Upload
from privacy.secure_aggregation.rostersum.site_events import Send
from tests.consortium import prepared
from tests.coordinator.sealed_site import SealedSite

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from coordinator.records import Share
    from federation.messages import StepStart
    from privacy.secure_aggregation.rostersum.site_events import Effect
    from tests.consortium import Answer, Consortium, Person, Running, Site

    Serving = Callable[..., AbstractAsyncContextManager[Running]]
    Sites = Callable[..., list[SealedSite]]
    Text = Callable[..., str]

GROUPS = ("abc", "def", "ghi")
EVERYBODY = "".join(GROUPS)
BAD = "b"
"""The site that scales its update."""
CLIP = 10.0
"""The job's norm bound."""


def update_of(name: str) -> np.ndarray:
    """A site's honest update: small, and each site's own."""
    place = EVERYBODY.index(name)
    return np.array([0.006 + 1e-4 * place, -0.003 - 1e-4 * (place * 4 % 9)], dtype="<f4")


def answering(name: str, scale: float = 1.0) -> Callable[[StepStart], bytes]:
    """What a site answers, its update scaled."""

    def answer(step: StepStart) -> bytes:
        match step.kind:
            case StepKind.STATISTICS:
                return prepared(step)
            case StepKind.TRAIN:
                return (scale * update_of(name)).tobytes()
            case StepKind.EVALUATE:
                words = np.zeros(step.length // 8, dtype="<f8")
                bins = (words.size - 3) // 2
                words[:3] = 4, 3, 2.0  # rows, correct, summed loss
                words[3 + bins // 2] = words[3 + bins + bins // 2 - 1] = 2  # two rows of each class
                return words.tobytes()

    return answer


def means(groups: tuple[str, ...] = GROUPS, scale: float = 1.0) -> np.ndarray:
    """The groups' mean updates, those of the bad site scaled."""
    return np.array([np.mean([update_of(s) * (scale if s == BAD else 1.0) for s in g], axis=0) for g in groups])


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who submits."""
    return consortium.member("op", Role.OPERATOR)


@pytest.fixture
def nine(consortium: Consortium, tmp_path: Path) -> Sites:
    """Makes the nine sites; `others` answer otherwise, by name."""

    def make(**others: Callable[[StepStart], Answer]) -> list[SealedSite]:
        members = {name: consortium.member(name) for name in EVERYBODY}
        answers = {name: others.get(name, answering(name)) for name in EVERYBODY}
        return [SealedSite(members[name], tmp_path / "sites", answers[name]) for name in EVERYBODY]

    return make


@pytest.fixture
def grouped_text(job_text: Text) -> Text:
    """Writes a job file of nine sites in three groups."""
    cells = ", ".join(f'["{first}", "{second}", "{third}"]' for first, second, third in GROUPS)
    privacy = f"groups = true\ncells = [{cells}]\ncolluding_sites = 1\nclip = {CLIP}\nweighting = 'uniform'"

    def write(strategy: str, *, rounds: int = 1, quorum: int = 6) -> str:
        text = job_text(rounds=rounds, minimum=9, quorum=quorum)
        return text.replace('secure_aggregation = "plain"', privacy).replace("fedavg", strategy)

    return write


async def finished(site: Site) -> None:
    """The job came to its end."""
    ended = await site.until(JobEnded)
    assert isinstance(ended, JobEnded)
    assert ended.state is JobState.FINISHED, ended.reason


def model_of(hub: Running, job: str) -> np.ndarray:
    """The model after the last committed step."""
    record = hub.store.job(job)
    assert record is not None
    assert record.model is not None
    _, values = from_safetensors((hub.folder / "jobs" / job / record.model.hex).read_bytes())
    return values.astype(np.float64)


def shares_of(hub: Running, job: str, kind: StepKind, number: int) -> dict[str, Share]:
    """What became of each site in a committed step."""
    (step,) = (each for each in hub.store.steps(job) if (each.kind, each.round) == (kind, number))
    return {share.site: share for share in step.shares}


def counted(shares: dict[str, Share]) -> str:
    """The sites that are in a step."""
    return "".join(sorted(name for name, share in shares.items() if share.outcome is Outcome.COUNTED))


# ---------------------------------------------------------------------------------------------------- robust strategies


@pytest.mark.parametrize("strategy", ["fedavg", "median", "trimmed_mean"])
def test_a_site_that_scales_its_update_moves_the_mean_and_not_the_robust_ones(
    running: Serving, nine: Sites, grouped_text: Text, operator: Person, strategy: str
) -> None:
    """By 1000, within the norm bound: no check can see it. FedAvg's model follows it, the others' do not."""
    sites = nine(**{BAD: answering(BAD, 1000.0)})
    assert np.linalg.norm(1000.0 * update_of(BAD)) <= CLIP

    async def story() -> None:
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, grouped_text(strategy))
            await finished(sites[0])
            model = model_of(hub, job)
            for step in hub.store.steps(job):
                assert counted(shares_of(hub, job, step.kind, step.round)) == EVERYBODY
        starts = {said.members for each in sites for said in each.told if isinstance(said, RoundStart)}
        assert starts == {(0, 1, 2), (3, 4, 5), (6, 7, 8), tuple(range(9))}
        honest = means(scale=1.0)
        if strategy == "fedavg":
            assert model == pytest.approx(means(scale=1000.0).mean(axis=0), abs=1e-6)
            assert np.abs(model - honest.mean(axis=0)).max() > 100 * np.ptp(honest, axis=0).max()
        else:
            assert model == pytest.approx(np.median(means(scale=1000.0), axis=0), abs=1e-6)
            assert np.abs(model - np.median(honest, axis=0)).max() < np.ptp(honest, axis=0).max()

    asyncio.run(story())


# --------------------------------------------------------------------------------------------------- a group that fails


def declining_once(name: str) -> Callable[[StepStart], Answer]:
    """A site that declines to train the first time, and trains then."""
    left = [True]

    def answer(step: StepStart) -> Answer:
        if step.kind is StepKind.TRAIN and left:
            left.clear()
            return DeclineCause.RESOURCES
        return answering(name)(step)

    return answer


@pytest.mark.parametrize("strategy", ["median", "fedavg"])
def test_a_group_that_loses_a_member_is_missing_and_the_round_counts_with_the_others(
    running: Serving, nine: Sites, grouped_text: Text, operator: Person, strategy: str
) -> None:
    """Its sites are told why, they are evaluated as ever, and in the next round the group is there again."""
    sites = nine(e=declining_once("e"))

    async def story() -> None:
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, grouped_text(strategy, rounds=2))
            await finished(sites[0])
            first = shares_of(hub, job, StepKind.TRAIN, 1)
            assert counted(first) == "abcghi"
            assert (first["e"].outcome, first["e"].cause) == (
                Outcome.DECLINED,
                "declined this step; its own log says why",
            )
            why = "its group has no sum: too few sites are ready: e"
            assert [(first[name].outcome, first[name].cause) for name in "df"] == [(Outcome.LATE, why)] * 2
            assert counted(shares_of(hub, job, StepKind.EVALUATE, 1)) == EVERYBODY
            assert counted(shares_of(hub, job, StepKind.TRAIN, 2)) == EVERYBODY
            assert [step.attempt for step in hub.store.steps(job)] == [0] * 5
            combine = np.median if strategy == "median" else np.mean
            expected = combine(means(("abc", "ghi")), axis=0) + combine(means(), axis=0)
            assert model_of(hub, job) == pytest.approx(expected, abs=1e-6)

    asyncio.run(story())


def test_a_round_with_too_few_sites_in_whole_groups_does_not_count(
    running: Serving, nine: Sites, grouped_text: Text, operator: Person
) -> None:
    """With a quorum of nine, what six opened is not used: the model does not move, and the step is summed again."""
    sites = nine(e=declining_once("e"))

    async def story() -> None:
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, grouped_text("median", quorum=9))
            await finished(sites[0])
            assert [(step.kind, step.attempt) for step in hub.store.steps(job)] == [
                (StepKind.STATISTICS, 0),
                (StepKind.TRAIN, 1),
                (StepKind.EVALUATE, 0),
            ]
            assert counted(shares_of(hub, job, StepKind.TRAIN, 1)) == EVERYBODY
            assert model_of(hub, job) == pytest.approx(np.median(means(), axis=0), abs=1e-6)
        results = [said.outcome for said in sites[0].told if isinstance(said, Result)]
        assert results == [messages.Outcome.OPENED] * 4, "the sum of a's group was opened twice, in two rounds"

    asyncio.run(story())


def test_a_burned_group_is_missing_and_the_words_say_what_did_not_hold(
    running: Serving, nine: Sites, grouped_text: Text, operator: Person
) -> None:
    """A tampered vector spoils its own group's sum and no other's."""
    sites = nine()
    (bad,) = (site for site in sites if site.name == BAD)
    bad.tamper = lambda content: content[:-1] + bytes([content[-1] ^ 1]) if len(content) == 4 * (1 + 2 + 4) else content

    async def story() -> None:
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, grouped_text("median"))
            await finished(sites[0])
            shares = shares_of(hub, job, StepKind.TRAIN, 1)
            assert counted(shares) == "defghi"
            why = "its group has no sum: the sum did not hold its checks"
            assert [shares[name].cause for name in "abc"] == [why] * 3
            assert model_of(hub, job) == pytest.approx(np.median(means(("def", "ghi")), axis=0), abs=1e-6)

    asyncio.run(story())


def test_when_all_groups_fail_the_step_fails_and_names_who_it_was(
    running: Serving, nine: Sites, grouped_text: Text, operator: Person
) -> None:
    """A member of each declines: one failure of the step, three times, and the job ends in words."""

    def never(name: str) -> Callable[[StepStart], Answer]:
        return lambda step: DeclineCause.RESOURCES if step.kind is StepKind.TRAIN else answering(name)(step)

    sites = nine(**{name: never(name) for name in "adg"})

    async def story() -> None:
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, grouped_text("median"))
            ended = await sites[1].until(JobEnded)
            assert isinstance(ended, JobEnded)
            assert ended.state is JobState.FAILED
            told = "; ".join(f"{name}: declined this step; its own log says why" for name in "adg")
            assert ended.reason == f"step 2 (train) failed 3 times ({told})"
            assert len(hub.store.steps(job)) == 1

    asyncio.run(story())


# --------------------------------------------------------------------------------------------------- restarts, refusals


@pytest.mark.parametrize("kind", [Upload, Open], ids=["while it takes uploads", "while sites open"])
def test_a_coordinator_restarted_among_groups_goes_on_with_each(
    running: Serving, nine: Sites, grouped_text: Text, operator: Person, kind: type
) -> None:
    """One group was held up, the others were summed or about to be: every group's sum is exact afterwards."""
    sites = nine()
    (held,) = (site for site in sites if site.name == "e")
    struck = asyncio.Event()

    def cut(effect: Effect) -> bool:
        training = any(isinstance(said, RoundStart) and said.plan_id == 2 for said in held.told)
        strikes = training and not struck.is_set() and isinstance(effect, Send) and isinstance(effect.message, kind)
        if strikes:
            struck.set()
        return strikes

    async def story() -> None:
        held.cut = cut
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, grouped_text("median"))
            await struck.wait()
        async with running() as hub, hub.attending(*sites):
            await finished(sites[0])
            assert counted(shares_of(hub, job, StepKind.TRAIN, 1)) == EVERYBODY
            assert model_of(hub, job) == pytest.approx(np.median(means(), axis=0), abs=1e-6)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_under_plain_aggregation_each_site_is_its_own_group(
    running: Serving, site: Callable[..., Site], job_text: Text, operator: Person
) -> None:
    """Three sites of which one lies: the model is the median of the updates, whatever they weigh."""
    scaled = {"a": 1.0, "b": 1000.0, "c": 1.0}
    sites = [site(name, answering(name, scale), weight=9.0 * scale) for name, scale in scaled.items()]

    async def story() -> None:
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, job_text(rounds=1).replace("fedavg", "median"))
            await finished(sites[0])
            expected = np.median([scale * update_of(name) for name, scale in scaled.items()], axis=0)
            assert model_of(hub, job) == pytest.approx(expected, abs=1e-7)

    asyncio.run(story())


def test_groups_that_the_roster_cannot_make_are_refused_at_submission(
    running: Serving, nine: Sites, grouped_text: Text, operator: Person
) -> None:
    """Nothing is stored; the words say how many there are, and what to do."""
    text = grouped_text("median").replace("colluding_sites = 1", "colluding_sites = 2")

    async def story() -> None:
        async with running() as hub:
            for each in nine():
                await hub.coordinator.members.meet(each.member.statement)
            with pytest.raises(ConfigurationError, match=r"cell \[0, 1, 2\] has 3 sites where c_max = 2 needs 4"):
                await hub.submit(operator, text)
            without = "\n".join(line for line in text.splitlines() if not line.startswith("cells"))
            with pytest.raises(ConfigurationError, match=r"needs 3 groups of sites, and 9 sites .* make 2"):
                await hub.submit(operator, without)
            assert hub.store.jobs() == ()

    asyncio.run(story())
