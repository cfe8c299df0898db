"""Seconds, CPU and memory of a training round, Parley's beside those of Flower's own deployment, in one run.

Both move the same float32 vectors between a server and its sites on this machine, and nobody trains. Flower runs as its
manual starts it: SuperLink, SuperNodes, the built-in FedAvg, no TLS, its state in memory, its evaluation off. Parley
runs its coordinator with mutual TLS 1.3 and the SQLite store, its evaluation step on; in plain, since Flower's FedAvg
is, and with --secure once more under secure aggregation. The first round does not count.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from federation.errors import ConfigurationError, ParleyError, WhoActs
from simulations.peers import flower_side, parley_side
from simulations.peers.measure import Figures
from simulations.peers.trial import Size, Trial, progress
from simulations.unmeasured import unmeasured

__all__ = ["main", "table"]

_SECURE = "parley_secure"
_SIDES: Mapping[str, Callable[[Trial], Figures]] = {
    "parley": parley_side.measure,
    _SECURE: partial(parley_side.measure, secure=True),
    "flower": flower_side.measure,
}
_ROUNDS = {"parley": 12, _SECURE: 12, "flower": 4}
"""Flower's rounds take many seconds each, and vary little."""
_LEAST = 2

Result = dict[str, dict[str, Figures]]
"""Figures by size and side."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for, prints it, and returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        sizes = [Size.parse(text) for text in asked.sizes.split(",")]
        sides = [asked.only] if asked.only else ["parley", "flower"]
        sides[1:1] = [_SECURE] if asked.secure else []
        result = _measured(sizes, sides, asked.rounds, asked.sites)
    except (KeyboardInterrupt, ParleyError) as ended:
        return unmeasured(ended, processes=True)
    if asked.json:
        plain = {size: {side: _plain(each) for side, each in sides.items()} for size, sides in result.items()}
        print(json.dumps(plain, indent=2))
    Console(stderr=asked.json, soft_wrap=True).print(table(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.peers.rounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON; the table then goes to standard error")
    parser.add_argument("--sizes", default="1MB,42MB", help="sizes of the vector [default: %(default)s]")
    parser.add_argument("--rounds", type=int, help="rounds of each side [default: 12 of Parley's, 4 of Flower's]")
    parser.add_argument("--sites", type=int, default=3, help="sites, each a process [default: %(default)s]")
    parser.add_argument("--only", choices=("parley", "flower"), help="measure one side alone")
    parser.add_argument("--secure", action="store_true", help="measure Parley under secure aggregation too (3 sites)")
    return parser


def _measured(sizes: Sequence[Size], sides: Sequence[str], rounds: int | None, sites: int) -> Result:
    """Runs the sides one after the other, each in a temporary folder that is gone afterwards."""
    if min(rounds or _LEAST, sites) < _LEAST:
        fix = "ask for two or more of each: the first round does not count"
        raise ConfigurationError(f"{rounds} rounds with {sites} sites cannot be measured", fix=fix, who=WhoActs.YOU)
    if "flower" in sides:
        flower_side.require()
    result: Result = {}
    for size in sizes:
        result[size.name] = {}
        for side in sides:
            with tempfile.TemporaryDirectory(prefix="parley-rounds-", ignore_cleanup_errors=True) as folder:
                progress(f"{side} {size.name}: starting")
                trial = Trial.prepare(Path(folder), size, rounds=rounds or _ROUNDS[side], sites=sites)
                result[size.name][side] = _SIDES[side](trial)
    return result


def _plain(measured: Figures) -> dict[str, float]:
    """The figures as JSON, without what this side has not."""
    return {name: round(value, 4) for name, value in asdict(measured).items() if value is not None}


def table(result: Result) -> Table:
    """The figures as people read them, with Flower's in multiples of Parley's where both were measured."""
    drawn = Table(
        "vector", "", "s a round", "slowest", "CPU s a round", "server's peak", "others' load", title="A training round"
    )
    for size, sides in result.items():
        for side, each in sides.items():
            second = each.serverapp_peak_rss_mb
            drawn.add_row(
                size,
                side,
                f"{each.seconds_per_round:.3f}",
                f"{each.slowest_round_seconds:.3f}",
                f"{each.cpu_seconds:.2f}",
                f"{each.peak_rss_mb:.0f} MB{f', ServerApp {second:.0f} MB' if second is not None else ''}",
                f"{each.others_load:.1f} cores",
            )
        if {"parley", _SECURE} <= sides.keys():
            drawn.add_row(*_ratios(sides["parley"], sides[_SECURE], "secure / plain"), style="bold")
        if {"parley", "flower"} <= sides.keys():
            ratios = _ratios(sides["parley"], sides["flower"], "flower / parley")
            drawn.add_row(*ratios, style="bold", end_section=True)
    return drawn


def _ratios(parley: Figures, other: Figures, what: str) -> tuple[str, ...]:
    seconds = other.seconds_per_round / parley.seconds_per_round
    peak = other.peak_rss_mb / parley.peak_rss_mb
    cpu = f"{other.cpu_seconds / parley.cpu_seconds:.1f} x" if parley.cpu_seconds else ""
    return "", what, f"{seconds:.1f} x", "", cpu, f"{peak:.1f} x", ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the processes are ended on the way out
    sys.exit(main())
