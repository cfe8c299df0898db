"""What secure aggregation costs, Parley's RosterSum beside Flower's SecAgg, in one run.

Masks: nanoseconds for each parameter of adding 9 masks (a site's own and those of 8 pairs) to a vector, one thread, the
best of several tries in CPU time. Parley's are 32-bit words of AES-256-CTR; the floor is 9 keystreams and 9 additions
and nothing else, both in the processor's cache; Flower's are its own functions as its clients call them, on the same
vector: numpy's Mersenne twister from a seed of 32 bits, in 64-bit integers.

Rounds: CPU seconds of a client and of the coordinator, and bytes that a client sends, for the sum of one vector of each
site, without drop-outs and with a tenth of the sites gone when their masked vectors are due. Parley's machines and
functions run as in the product, post-quantum keys and escrow on; Flower's are its own workflow and client mod, its
SecAgg, in which each pair of sites shares a mask, as in RosterSum, with its default settings, and the threshold of two
thirds of its example. Neither side waits for a network or a disk; what it takes to carry messages and vectors is told
apart. Parley agrees on keys once in an epoch, which is told apart too; Flower does so in every round.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from federation.errors import ConfigurationError, ParleyError, WhoActs
from simulations.peers import (
    flower_side,
    secure_aggregation_masks,
    secure_aggregation_rostersum,
    secure_aggregation_secagg,
)
from simulations.peers.secure_aggregation_costs import Cost, Updates
from simulations.peers.secure_aggregation_masks import MaskCost
from simulations.peers.trial import progress
from simulations.unmeasured import unmeasured

__all__ = ["Rounds", "main", "mask_table", "round_table", "setup_table"]

_LEAST = 1000
"""Parameters below which calls are measured rather than masks."""
_SITES = range(5, 101)
"""Sites that a job can have and one of which may be missing."""
_PARTS = ("masks", "rounds")

Sides = dict[str, Cost]
"""Costs by side."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The costs of one number of sites.

    Attributes:
        setup: Of an epoch's keys; only Parley has epochs.
        round: Of a round without drop-outs.
        with_dropouts: Of one with drop-outs; empty where none was asked for.
    """

    setup: Sides
    round: Sides
    with_dropouts: Sides


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for, prints it, and returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        parts = (asked.only,) if asked.only else _PARTS
        sizes, updates = _sizes(asked.sizes), _updates(asked.sites, asked.parameters)
        flower_side.require()
        masks = _masks(sizes) if "masks" in parts else {}
        rounds = _rounds(updates, asked) if "rounds" in parts else {}
    except (KeyboardInterrupt, ParleyError) as ended:
        return unmeasured(ended)
    if asked.json:
        print(json.dumps(_plain(masks, rounds, asked.parameters), indent=2))
    screen = Console(stderr=asked.json, soft_wrap=True)
    for drawn in _tables(masks, rounds, asked.parameters):
        screen.print(drawn)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.peers.secure_aggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON; the tables then go to standard error")
    parser.add_argument("--only", choices=_PARTS, help="measure one part alone")
    masks = parser.add_argument_group("masks")
    masks.add_argument("--sizes", default="1000000,10000000", help="parameters of a vector [default: %(default)s]")
    rounds = parser.add_argument_group("rounds")
    rounds.add_argument("--sites", default="10,50,100", help="numbers of sites, 5 to 100 each [default: %(default)s]")
    rounds.add_argument("--parameters", type=int, default=1_000_000, help="of each vector [default: %(default)s]")
    rounds.add_argument("--without-dropouts", action="store_true", help="leave the rounds with drop-outs out")
    rounds.add_argument(
        "--flower-sites",
        type=int,
        default=100,
        help="measure Flower with up to so many sites: with 100 it takes many minutes [default: %(default)s]",
    )
    return parser


def _sizes(text: str) -> list[int]:
    sizes = _numbers(text)
    if not sizes or min(sizes) < _LEAST:
        raise _refusal(f"{text!r} are not sizes of vectors", f"give whole numbers of {_LEAST} or more")
    return sizes


def _updates(text: str, parameters: int) -> list[Updates]:
    numbers = _numbers(text)
    if not numbers or any(number not in _SITES for number in numbers):
        raise _refusal(f"{text!r} are not numbers of sites", f"give whole numbers of {_SITES[0]} to {_SITES[-1]}")
    if parameters < _LEAST:
        raise _refusal(f"{parameters} parameters are too few to be measured", f"give {_LEAST} or more")
    return [Updates(number, parameters) for number in numbers]


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        return []


def _refusal(problem: str, fix: str) -> ConfigurationError:
    return ConfigurationError(problem, fix=f"{fix}, with commas between them where there are several", who=WhoActs.YOU)


def _masks(sizes: Sequence[int]) -> dict[int, MaskCost]:
    costs = {}
    for size in sizes:
        progress(f"masks of {size:,} parameters")
        costs[size] = secure_aggregation_masks.measure(size)
    return costs


def _rounds(updates: Sequence[Updates], asked: argparse.Namespace) -> dict[int, Rounds]:
    return {each.sites: _measured(each, asked.flower_sites, dropouts=not asked.without_dropouts) for each in updates}


def _measured(updates: Updates, flower_sites: int, *, dropouts: bool) -> Rounds:
    """Both sides on the same vectors, one after the other; Parley's files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="parley-secure-aggregation-", ignore_cleanup_errors=True) as folder:
        needed, free = secure_aggregation_rostersum.room(updates), shutil.disk_usage(folder).free
        if free < needed:
            raise ConfigurationError(
                f"{updates.sites} sites write up to {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left",
                fix="set TMPDIR to a folder with room, or ask for fewer sites or parameters",
                who=WhoActs.YOU,
            )
        ours = secure_aggregation_rostersum.measure(updates, Path(folder), dropouts=dropouts)
    found = Rounds({"parley": ours.setup}, {"parley": ours.round}, {})
    if ours.with_dropouts is not None:
        found.with_dropouts["parley"] = ours.with_dropouts
    if updates.sites > flower_sites:
        progress(f"flower, {updates.sites} sites: skipped (--flower-sites {flower_sites})")
        return found
    found.round["flower"] = secure_aggregation_secagg.measure(updates, dropouts=False)
    if dropouts:
        found.with_dropouts["flower"] = secure_aggregation_secagg.measure(updates, dropouts=True)
    return found


# ------------------------------------------------------------------------------------------------------------- in print


def _plain(masks: dict[int, MaskCost], rounds: dict[int, Rounds], parameters: int) -> dict[str, object]:
    """All that was measured as JSON, what was not left out."""
    plain: dict[str, object] = {}
    if masks:
        costs = {str(size): asdict(cost) for size, cost in masks.items()}
        plain["mask"] = {size: {name: round(ns, 3) for name, ns in cost.items()} for size, cost in costs.items()}
    if not rounds:
        return plain
    plain["round"] = {str(n): _costs(each.round) for n, each in rounds.items()}
    if any(each.with_dropouts for each in rounds.values()):
        plain["round_with_dropouts"] = {str(n): _costs(each.with_dropouts) for n, each in rounds.items()}
    plain["epoch_setup"] = {str(n): _costs(each.setup) for n, each in rounds.items()}
    plain["round_transport_cpu"] = {
        str(n): {side: round(cost.transport_cpu, 4) for side, cost in each.round.items()} for n, each in rounds.items()
    }
    plain["settings"] = {
        "parameters": parameters,
        "dropouts": {str(n): len(Updates(n, parameters).missing) for n in rounds},
        "flower_workflow": "SecAggWorkflow: num_shares 1.0, each site with all others",
        "flower_reconstruction_threshold": round(secure_aggregation_secagg.THRESHOLD, 3),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    return plain


def _costs(sides: Sides) -> dict[str, dict[str, float]]:
    return {
        side: {
            "client_cpu": round(cost.client_cpu, 4),
            "coordinator_cpu": round(cost.coordinator_cpu, 4),
            "client_bytes": round(cost.client_bytes),
        }
        for side, cost in sides.items()
    }


def _tables(masks: dict[int, MaskCost], rounds: dict[int, Rounds], parameters: int) -> list[Table]:
    drawn = [mask_table(masks)] if masks else []
    if rounds:
        of = f"a vector of {parameters:,} parameters, load average {os.getloadavg()[0]:.1f}"
        drawn.append(round_table(f"A round: {of}", {n: each.round for n, each in rounds.items()}, parameters))
        dropped = {n: each.with_dropouts for n, each in rounds.items() if each.with_dropouts}
        if dropped:
            title = "A round in which a tenth of the sites drop out"
            drawn.append(round_table(title, dropped, parameters))
        drawn.append(setup_table({n: each.setup for n, each in rounds.items()}))
    return drawn


def mask_table(costs: dict[int, MaskCost]) -> Table:
    """The masks' costs as people read them, beside the floor and in multiples of Parley's."""
    drawn = Table(
        "parameters", "Parley", "floor", "over the floor", "Flower", "Flower / Parley", title="Masks, ns a parameter"
    )
    for size, cost in costs.items():
        drawn.add_row(
            f"{size:,}",
            f"{cost.parley_ns:.2f}",
            f"{cost.floor_ns:.2f}",
            f"{cost.parley_ns / cost.floor_ns:.2f} x",
            f"{cost.flower_ns:.1f}",
            f"{cost.flower_ns / cost.parley_ns:.1f} x",
        )
    return drawn


def round_table(title: str, costs: dict[int, Sides], parameters: int) -> Table:
    """The rounds' costs as people read them, with Flower's in multiples of Parley's where both were measured."""
    columns = ("sites", "", "client CPU", "coordinator CPU", "client bytes", "/ parameter", "transport CPU")
    drawn = Table(*columns, title=title)
    for sites, sides in costs.items():
        for side, cost in sides.items():
            drawn.add_row(
                str(sites),
                side,
                f"{cost.client_cpu:.3f} s",
                f"{cost.coordinator_cpu:.3f} s",
                f"{cost.client_bytes:,.0f}",
                f"{cost.client_bytes / parameters:.3f}",
                f"{cost.transport_cpu:.2f} s",
            )
        if {"parley", "flower"} <= sides.keys():
            drawn.add_row(*_ratios(sides["parley"], sides["flower"]), style="bold", end_section=True)
    return drawn


def _ratios(parley: Cost, flower: Cost) -> tuple[str, ...]:
    pairs = (
        (flower.client_cpu, parley.client_cpu),
        (flower.coordinator_cpu, parley.coordinator_cpu),
        (flower.client_bytes, parley.client_bytes),
    )
    return "", "ratio", *(f"{theirs / ours:.1f} x" if ours else "" for theirs, ours in pairs), "", ""


def setup_table(costs: dict[int, Sides]) -> Table:
    """What an epoch's keys cost: agreed on once, for up to 24 hours and 1000 rounds."""
    drawn = Table("sites", "", "client CPU", "coordinator CPU", "client bytes", title="An epoch's keys")
    for sites, sides in costs.items():
        for side, cost in sides.items():
            figures = f"{cost.client_cpu:.3f} s", f"{cost.coordinator_cpu:.3f} s", f"{cost.client_bytes:,.0f}"
            drawn.add_row(str(sites), side, *figures)
    return drawn


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
