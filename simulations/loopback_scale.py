"""Seconds and CPU seconds of secure aggregation at its largest: 100 sites in one process, each with its own machine.

Every site checks every signature, masks for every other site and seals a share for each, as it does on a machine of its
own; messages travel as bytes, which each party decodes for itself. Every sum is checked: an exact one word by word, one
with noise by the variance of what is left of it. Of a figure in seconds, what else runs on this machine is a part; the
CPU seconds are this process's own.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from federation.errors import ConfigurationError, LocalProtocolError, ParleyError, WhoActs
from federation.vector import F32, F64
from privacy.crypto.masks import Words
from privacy.secure_aggregation.rostersum import noised
from privacy.secure_aggregation.rostersum import site_events as at_site
from privacy.secure_aggregation.rostersum.durable import Point
from privacy.secure_aggregation.rostersum.noise import mechanism_of, round_noise
from privacy.secure_aggregation.rostersum.plans import model_size
from privacy.secure_aggregation.rostersum.terms import GUARD_WORDS, Churn
from simulations.loopback import Loopback, Outcome, as_contributed
from simulations.loopback_job import PLAN, LoopbackJob, encoded
from simulations.scale_bars import Bar, Tell
from simulations.unmeasured import unmeasured

__all__ = ["LoopbackCost", "main", "measure", "table"]

_LIMIT = 120.0
"""Seconds that the default sizes may take, on two cores that others use as well."""
_SIGMAS = 10
"""Standard deviations by which a variance that is right is never off."""
_SETTLED = 5.0
"""Seconds of the simulation's clock in which all keys have come."""


@dataclass(frozen=True, slots=True)
class LoopbackCost:
    """What a job of this size took.

    Attributes:
        sites: Its sites.
        rounds: Its rounds.
        parameters: Values of a vector.
        churn: Who may be missing from a sum: "dp" adds noise.
        seconds: All of it, from the first key to the last sum.
        cpu_seconds: CPU time of all of it.
        setup_cpu_seconds: CPU time until all pairs share keys.
        round_cpu_seconds: CPU time of a round, on average.
        load_average: Of the machine at the end, over a minute.
    """

    sites: int
    rounds: int
    parameters: int
    churn: Churn
    seconds: float
    cpu_seconds: float
    setup_cpu_seconds: float
    round_cpu_seconds: float
    load_average: float

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The bar that it is held against; it is meant for the default sizes."""
        what = f"{self.sites} sites, {self.rounds} rounds, {self.parameters:,} parameters, churn {self.churn}"
        return (Bar(what, self.seconds, _LIMIT, "s"),)

    @property
    def plain(self) -> dict[str, object]:
        """The figures as JSON."""
        return {
            "sites": self.sites,
            "rounds": self.rounds,
            "parameters": self.parameters,
            "churn": self.churn.value,
            "seconds": round(self.seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 2),
            "setup_cpu_seconds": round(self.setup_cpu_seconds, 2),
            "round_cpu_seconds": round(self.round_cpu_seconds, 3),
            "load_average": round(self.load_average, 2),
            "bars": [bar.plain for bar in self.bars],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for, prints it, and returns the exit status: 0 whatever the figures say."""
    asked = _parser().parse_args(arguments)
    screen = Console(stderr=True)
    try:
        job = _job(asked)
        with _progress(screen) as tell:
            cost = measure(job, asked.rounds, tell)
    except (KeyboardInterrupt, ParleyError) as ended:
        return unmeasured(ended)
    if asked.json:
        print(json.dumps(cost.plain, indent=2))
    Console(stderr=asked.json, soft_wrap=True).print(table(cost))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.loopback_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON; the table then goes to standard error")
    parser.add_argument("--sites", type=int, default=100, help="sites, 3 to 100 [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=10, help="rounds [default: %(default)s]")
    parser.add_argument("--parameters", type=int, default=100_000, help="of each vector [default: %(default)s]")
    churns = [churn.value for churn in Churn]
    parser.add_argument("--churn", choices=churns, default="cells", help="who may be missing [default: %(default)s]")
    return parser


def _job(asked: argparse.Namespace) -> LoopbackJob:
    if min(asked.sites, asked.rounds, asked.parameters) < 1:
        problem = f"{asked.sites} sites, {asked.rounds} rounds and {asked.parameters} parameters are no job"
        raise ConfigurationError(problem, fix="ask for one or more of each", who=WhoActs.YOU)
    return LoopbackJob.of(asked.sites, asked.parameters, Churn(asked.churn))


@contextmanager
def _progress(screen: Console) -> Iterator[Tell]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen) as shown:
        task = shown.add_task("starting", total=1.0)

        def tell(what: str, share: float) -> None:
            shown.update(task, description=what, completed=share)

        yield tell


def measure(job: LoopbackJob, rounds: int, tell: Tell) -> LoopbackCost:
    """What so many rounds of the job take, one after the other, over a network that loses nothing.

    Raises:
        LocalProtocolError: A round has no sum, or another than that of the sites' vectors.
    """
    plan = job.terms.plans[0]
    vectors, check = _work(job)
    begun, cpu = time.perf_counter(), time.process_time()
    tell("keys of all pairs", 0.0)
    encode = encoded if plan.churn is Churn.DP else as_contributed
    loop = Loopback(job.terms, job.coordinator, job.sites, lambda idx, _: vectors[idx], encode=encode)
    loop.pass_time(_SETTLED)
    settled = time.process_time()
    for number in range(rounds):
        _follow(loop, tell, number, rounds)
        check(loop.step(PLAN, hashlib.sha256(number.to_bytes(8, "big")).digest()))
    tell("done", 1.0)
    ended = time.process_time()
    return LoopbackCost(
        sites=job.terms.n,
        rounds=rounds,
        parameters=model_size(plan),
        churn=plan.churn,
        seconds=time.perf_counter() - begun,
        cpu_seconds=ended - cpu,
        setup_cpu_seconds=settled - cpu,
        round_cpu_seconds=(ended - settled) / rounds,
        load_average=os.getloadavg()[0],
    )


def _work(job: LoopbackJob) -> tuple[Sequence[Words | F32], Callable[[Outcome], None]]:
    """What each site contributes, and what a round's sum of it is held against."""
    everyone = range(job.terms.n)
    if job.terms.plans[0].churn is Churn.DP:
        updates = [_update(job, idx) for idx in everyone]
        return updates, partial(_check_noise, job, np.sum(updates, axis=0, dtype=np.float64))
    words = [_vector(job, idx) for idx in everyone]
    return words, partial(_check, np.sum(words, axis=0, dtype=words[0].dtype))


def _vector(job: LoopbackJob, idx: int) -> Words:
    """A site's vector: words of all sizes, which wrap when they are summed, and the guard."""
    words = np.random.default_rng(idx).integers(0, 1 << 32, job.terms.plans[0].words, dtype=np.uint32)
    words[-GUARD_WORDS:] = 1
    return words.astype("<u4")


def _update(job: LoopbackJob, idx: int) -> F32:
    """A site's update: as many values as the plan holds, within the clip."""
    size = model_size(job.terms.plans[0])
    values: F32 = (np.random.default_rng(idx).normal(size=size) * mechanism_of(job.terms.plans[0]).clip).astype("<f4")
    return values / np.float32(2 * size**0.5)


def _follow(loop: Loopback, tell: Tell, number: int, rounds: int) -> None:
    """Tells of a round whenever a site masks or opens: half of its work each."""
    done = 0

    def performed(_party: int, effect: object) -> None:
        nonlocal done
        if isinstance(effect, at_site.Mask) or (isinstance(effect, at_site.Persist) and effect.point is Point.OPENED):
            done += 1
            tell(f"round {number + 1} of {rounds}", (number + done / (2 * loop.terms.n)) / rounds)

    loop.performed = performed


def _check_noise(job: LoopbackJob, expected: F64, outcome: Outcome) -> None:
    """What is left of the sum without the updates has the variance of all members' shares, and no other."""
    plan, (one, *_) = job.terms.plans[0], (*outcome.sums, None)
    if one is None:
        raise LocalProtocolError(f"a round has no sum: {'; '.join(failure.detail for failure in outcome.failures)}")
    noise, members = round_noise(plan, len(one.members), job.terms.c_max), len(one.members)
    found = noised.decode(plan, one.words, members, one.ctx, np.empty(noise.mechanism.dimension)).values - expected
    ratio = float(np.var(found)) * noise.mechanism.scale**2 / (members * noise.variance)
    if not abs(ratio - 1) < _SIGMAS * sqrt(2 / found.size):
        raise LocalProtocolError(f"a sum's noise has {ratio:.4f} times the variance of its members' shares")


def _check(expected: Words, outcome: Outcome) -> None:
    if len(outcome.sums) != 1 or not np.array_equal(outcome.sums[0].words, expected):
        why = "; ".join(failure.detail for failure in outcome.failures) or "it is another sum"
        raise LocalProtocolError(f"a round did not give the sum of the sites' vectors: {why}")


def table(cost: LoopbackCost) -> Table:
    """The figures, and the bar that they are held against."""
    drawn = Table("", "measured", "at most", "holds", title="Secure aggregation in one process")
    for bar in cost.bars:
        verdict = "[green]yes[/]" if bar.holds else "[bold red]no[/]"
        drawn.add_row(bar.what, f"{bar.measured:.1f} {bar.unit}", f"{bar.limit:g} {bar.unit}", verdict)
    drawn.add_row("CPU", f"{cost.cpu_seconds:.1f} s", "", "")
    drawn.add_row("CPU of an epoch's keys", f"{cost.setup_cpu_seconds:.1f} s", "", "")
    drawn.add_row("CPU of a round", f"{cost.round_cpu_seconds:.2f} s", "", "")
    drawn.add_row("load average", f"{cost.load_average:.1f}", "", "")
    return drawn


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
