"""What secure aggregation costs a site, Parley's RosterSum beside Flower's SecAgg+, in one run.

Masks: nanoseconds for each parameter of adding 9 masks (a site's own and those of 8 pairs) to a vector, one thread, the
best of several tries in CPU time. Parley's are 32-bit words of AES-256-CTR; the floor is 9 keystreams and 9 additions
and nothing else, both in the processor's cache; Flower's are its own functions as its clients call them, on the same
vector: numpy's Mersenne twister from a seed of 32 bits, in 64-bit integers.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from federation.errors import ConfigurationError, ParleyError, WhoActs
from simulations.peers import flower_side, secure_aggregation_masks
from simulations.peers.secure_aggregation_masks import MaskCost
from simulations.peers.trial import progress

__all__ = ["main", "mask_table"]

_LEAST = 1000
"""Parameters below which calls are measured rather than masks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for, prints it, and returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        sizes = _sizes(asked.sizes)
        flower_side.require()
        masks = _masks(sizes)
    except KeyboardInterrupt:
        progress("interrupted")
        return 130
    except ParleyError as refused:
        progress(f"refused: {refused}")
        return 2 if isinstance(refused, ConfigurationError) else 1
    if asked.json:
        print(json.dumps({"mask": {str(size): _plain(cost) for size, cost in masks.items()}}, indent=2))
    Console(stderr=asked.json, soft_wrap=True).print(mask_table(masks))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.peers.secure_aggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON; the table then goes to standard error")
    parser.add_argument("--sizes", default="1000000,10000000", help="parameters of a vector [default: %(default)s]")
    return parser


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < _LEAST:
        fix = f"give whole numbers of {_LEAST} or more, with commas between them"
        raise ConfigurationError(f"{text!r} are not sizes of vectors", fix=fix, who=WhoActs.YOU)
    return sizes


def _masks(sizes: Sequence[int]) -> dict[int, MaskCost]:
    costs = {}
    for size in sizes:
        progress(f"masks of {size:,} parameters")
        costs[size] = secure_aggregation_masks.measure(size)
    return costs


def _plain(cost: MaskCost) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(cost).items()}


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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
