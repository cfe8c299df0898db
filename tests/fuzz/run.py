"""Runs the fuzz tests over and over, each time with another seed, until the minutes are over or one of them fails.

`python -m tests.fuzz.run --minutes 10`, or `make fuzz`. A failure is kept in `tests/fuzz/corpus/hypothesis/`, from
where every test run brings it back; inputs that led somewhere new stand in the other folders beside it.
"""

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.profiles import CORPUS, FOUND, PROFILE

__all__ = ["main"]

_FOLDER = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 when nothing was found for so long, otherwise that of the pass that found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; the last pass is brought to its end")
    parser.add_argument("--seed", type=int, help="the first pass's seed, to run that pass again; default: any")
    parser.add_argument("--tests", type=Path, default=_FOLDER, help="a file or folder of fuzz tests; default: all")
    chosen = parser.parse_args(arguments)
    first: int = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(2**32)
    began, before, passes = time.monotonic(), _kept(), 0
    while not passes or time.monotonic() - began < 60 * chosen.minutes:
        seed = first + passes
        status = _pass(chosen.tests, seed)
        passes += 1
        minutes = (time.monotonic() - began) / 60
        if status:
            _tell(f"fuzz: pass {passes}, of seed {seed}, found something after {minutes:.1f} minutes; see above.")
            _tell(f"fuzz: every test run brings it back from {CORPUS.name}/ until it is fixed. Add a test of its own.")
            return status
        _tell(
            f"fuzz: pass {passes}, of seed {seed}, found nothing; {minutes:.1f} of {chosen.minutes:g} minutes are over"
        )
    _tell(f"fuzz: nothing found; {_kept() - before} inputs were kept that led somewhere new, {_kept()} in all")
    return 0


def _pass(tests: Path, seed: int) -> int:
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-n", "2", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, f"--hypothesis-profile={PROFILE}", f"--hypothesis-seed={seed}"], check=False
    ).returncode


def _kept() -> int:
    """Inputs in the corpus, without hypothesis' own."""
    return sum(path.is_file() for path in CORPUS.glob("*/*") if path.parent.name != FOUND)


def _tell(words: str) -> None:
    print(words, flush=True)  # noqa: T201 - a command's progress


if __name__ == "__main__":
    sys.exit(main())
