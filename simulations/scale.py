"""Memory, CPU time and seconds where a federation is large: many sites, a large vector, many that only attend.

Everything runs for real on this machine: the coordinator's own command, mutual TLS 1.3, the SQLite store, and bare
sites, which attend as real ones do but train nothing. Each figure is held against a bar, and memory is in MiB. The bars
are meant for the default sizes: of a small model or vector, what the programs need anyway is the larger part.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from federation.errors import ConfigurationError, ParleyError, WhoActs
from simulations.peers.trial import Size
from simulations.scale_attend import Attending
from simulations.scale_bars import Benchmark, Measured, Tell
from simulations.scale_sites import Cohorts
from simulations.scale_vector import Vector
from simulations.unmeasured import unmeasured

__all__ = ["main", "table"]

_NAMES = ("sites", "vector", "attend")
_LEAST_SITES = 2
_LEAST_ROUNDS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for, prints it, and returns the exit status: 0 whatever the figures say."""
    asked = _parser().parse_args(arguments)
    screen = Console(stderr=True)
    try:
        found = {name: _measured(name, benchmark, screen) for name, benchmark in _benchmarks(asked).items()}
    except (KeyboardInterrupt, ParleyError) as ended:
        return unmeasured(ended, processes=True)
    if asked.json:
        print(json.dumps({name: _plain(each) for name, each in found.items()}, indent=2))
    Console(stderr=asked.json, soft_wrap=True).print(table(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("which", nargs="?", choices=(*_NAMES, "all"), default="all", help="[default: %(default)s]")
    parser.add_argument("--json", action="store_true", help="print JSON; the table then goes to standard error")
    sites = parser.add_argument_group("sites")
    sites.add_argument("--model", default="42MB", help="size of the model [default: %(default)s]")
    sites.add_argument("--cohorts", default="4,16", help="numbers of sites to compare [default: %(default)s]")
    sites.add_argument("--rounds", type=int, default=4, help="rounds of each cohort [default: %(default)s]")
    vector = parser.add_argument_group("vector")
    vector.add_argument("--megabytes", type=int, default=1000, help="size of the vector [default: %(default)s]")
    vector.add_argument("--senders", type=int, default=4, help="sites that send it [default: %(default)s]")
    attend = parser.add_argument_group("attend")
    attend.add_argument("--attending", type=int, default=200, help="sites that attend [default: %(default)s]")
    attend.add_argument("--idle", type=float, default=30.0, help="seconds left alone [default: %(default)s]")
    return parser


def _benchmarks(asked: argparse.Namespace) -> Mapping[str, Benchmark]:
    """What is asked for, checked.

    Raises:
        ConfigurationError: A size means nothing.
    """
    counts = _counts(asked.cohorts)
    if min(*counts, asked.senders, asked.attending) < _LEAST_SITES or asked.rounds < _LEAST_ROUNDS:
        raise _refusal("fewer than two sites or rounds cannot be measured", "ask for two or more of each")
    if asked.megabytes < 1 or asked.idle <= 0:
        raise _refusal("a vector or an idle time of nothing cannot be measured", "ask for more than 0")
    every: Mapping[str, Benchmark] = {
        "sites": Cohorts(Size.parse(asked.model), counts, asked.rounds),
        "vector": Vector(asked.megabytes, asked.senders),
        "attend": Attending(asked.attending, asked.idle),
    }
    return {name: benchmark for name, benchmark in every.items() if asked.which in {name, "all"}}


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        counts = ()
    if len(counts) < 2:  # noqa: PLR2004 - a comparison has two sides
        raise _refusal(f"--cohorts {text!r} gives nothing to compare", "write two numbers or more, such as 4,16")
    return counts


def _refusal(problem: str, fix: str) -> ConfigurationError:
    return ConfigurationError(problem, fix=fix, who=WhoActs.YOU)


def _measured(name: str, benchmark: Benchmark, screen: Console) -> Measured:
    """Runs a benchmark in a temporary folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="parley-scale-", ignore_cleanup_errors=True) as folder:
        free = shutil.disk_usage(folder).free
        if free < benchmark.disk:
            raise _refusal(
                f"{name} writes up to {benchmark.disk / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left",
                "set TMPDIR to a folder with room, or ask for smaller sizes",
            )
        with _progress(name, screen) as tell:
            return benchmark.measure(Path(folder), tell)


@contextmanager
def _progress(name: str, screen: Console) -> Iterator[Tell]:
    columns = TextColumn("{task.fields[name]}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=screen) as shown:
        task = shown.add_task("starting", name=f"{name:<6}", total=1.0)

        def tell(what: str, share: float) -> None:
            shown.update(task, description=what, completed=share)

        yield tell
        tell("done", 1.0)


def _plain(measured: Measured) -> Mapping[str, object]:
    return {**measured.plain, "bars": [bar.plain for bar in measured.bars]}


def table(found: Mapping[str, Measured]) -> Table:
    """Each figure beside the bar that it is held against."""
    drawn = Table("", "", "measured", "at most", "holds", title="Scale")
    for name, measured in found.items():
        for bar in measured.bars:
            verdict = "[green]yes[/]" if bar.holds else "[bold red]no[/]"
            drawn.add_row(name, bar.what, f"{bar.measured:.1f} {bar.unit}", f"{bar.limit:g} {bar.unit}", verdict)
    return drawn


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the processes are ended on the way out
    sys.exit(main())
