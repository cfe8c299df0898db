"""Runs a command of Parley's that dies at a given point of its work: before or after the N-th call of a function.

`python tests/faults/killing.py POINT N [OPTIONS] -- ARGUMENTS...` is `parley ARGUMENTS...` but for that. POINT is
`before:MODULE:FUNCTION` or `after:MODULE:FUNCTION`, or `never`; a `?CLASS` behind it counts only the calls that have an
argument of a class of this name. It dies by SIGKILL, and the product knows nothing of it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import hashlib
import importlib
import inspect
import itertools
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, assert_never

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as the command does before it loads grpc

import numpy as np

import client.agent
import coordinator.coordinator
import coordinator.service
import coordinator.store
import coordinator.worker
import parley.command_line  # noqa: F401 - loaded before the processes fork, like all the others
from client.backoff import Backoff
from client.training import protocol
from coordinator import conduct
from federation import blobs, codec, plugins
from federation.job import parse
from federation.vector import from_safetensors
from parley.__main__ import main as parley_main
from privacy.secure_aggregation.rostersum.coordinator import Patience

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import RawIOBase

__all__ = ["TABLE", "LightWork", "Point", "evaluation", "main", "run"]

_PR_SET_PDEATHSIG = 1
_CHUNK = 8 * 1024
_PATIENCE = 0.3
"""Seconds that stand in the place of the product's five: for a lock, and until the store is tried again."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment in a process's life: before or after the `count`-th call of a function."""

    after: bool
    module: str
    function: str
    of: str
    count: int

    @classmethod
    def parse(cls, text: str, count: int) -> Self:
        """The point that a command line names."""
        when, module, function = text.split(":")
        function, _, of = function.partition("?")
        return cls({"before": False, "after": True}[when], module, function, of, count)

    def arm(self, strike: Callable[[], None]) -> None:
        """From now on `strike` is called at this point."""
        *owners, name = self.function.split(".")
        owner = importlib.import_module(self.module)
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, self._wrapped(getattr(owner, name), strike))

    def _wrapped(self, original: Callable[..., Any], strike: Callable[[], None]) -> Callable[..., Any]:
        calls = itertools.count(1)

        def counts(arguments: tuple[object, ...]) -> bool:
            of = not self.of or any(type(each).__name__ == self.of for each in arguments)
            return of and next(calls) == self.count

        @wraps(original)
        def plain(*arguments: Any, **named: Any) -> Any:
            struck = counts(arguments)
            if struck and not self.after:
                strike()
            result = original(*arguments, **named)
            if struck and self.after:
                strike()
            return result

        @wraps(original)
        async def awaited(*arguments: Any, **named: Any) -> Any:
            struck = counts(arguments)
            if struck and not self.after:
                strike()
            result = await original(*arguments, **named)
            if struck and self.after:
                strike()
            return result

        return awaited if inspect.iscoroutinefunction(original) else plain


TABLE = protocol.Table("00" * 32, rows=100, test_rows=20, rarest=10)
"""Of made-up rows."""


def rounded(values: np.ndarray) -> np.ndarray:
    """To multiples of 2^-10, which a job can have summed securely without a rounding that is left to chance."""
    return np.round(values * 2**10) / 2**10


class LightWork:
    """Stands where the trainer stands. Its answers follow from the site's name and the very bytes that it is given.

    So an update that was lost, doubled, or made from another model shows in every model after it, to the last bit.
    """

    pause = 0.0
    """Seconds that each piece of work takes."""
    keep: Path | None = None
    """Where a copy of each result is put beside."""

    def __init__(self, home: Path) -> None:
        self._name = str(home.parent.name)

    async def ask(self, request: protocol.Request) -> protocol.Answer:
        """The answer to `request`."""
        match request:
            case protocol.Warm():
                return protocol.Done()
            case protocol.CheckData():
                return protocol.Done(table=TABLE)
            case protocol.ComputeStatistics():
                draw = self._draw(b"")
                values = np.array([10.0, draw.uniform(-5, 5), draw.uniform(5, 10)], dtype="<f8")
            case protocol.Train():
                model = await _content(request.model)
                draw = self._draw(model + await _content(request.preparation))
                values = rounded(draw.standard_normal(from_safetensors(model)[0].size)).astype("<f4")
            case protocol.Evaluate():
                draw = self._draw(await _content(request.model))
                values = evaluation(request.subject.job, int(draw.integers(2**32)))
            case _:
                assert_never(request)
        await asyncio.sleep(self.pause)
        values.tofile(request.output)
        if self.keep is not None:
            kept = len(list(self.keep.iterdir()))
            np.save(self.keep / f"{self._name}-{request.kind}-{kept}", values)
        return protocol.Done(values.size, float(draw.integers(1, 100)), 0.01, table=TABLE)

    async def close(self) -> None:
        """Nothing runs."""

    def _draw(self, given: bytes) -> np.random.Generator:
        return np.random.default_rng(list(hashlib.sha256(self._name.encode() + given).digest()))


async def _content(path: str) -> bytes:
    return await asyncio.to_thread(Path(path).read_bytes)


@lru_cache(maxsize=8)
def evaluation(text: str, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """An evaluation of made-up rows, as the job's task counts them."""
    job = parse(text)
    outputs = np.random.default_rng(seed).standard_normal((20, 1)).astype(np.float32)
    counted: np.ndarray[tuple[int], np.dtype[np.float64]] = (
        plugins.load("tasks", job.task.kind).make(job).evaluate(outputs, np.arange(20) % 2)
    )
    return counted


def run(arguments: list[str], log: Path) -> None:
    """`main`, in a process forked for it: what it says goes to the end of `log`, and it dies with who forked it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(arguments)


def main(arguments: list[str]) -> None:
    """Runs the command, and kills this process when its point is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("point", metavar="POINT", help="before:MODULE:FUNCTION[?CLASS], after:..., or never")
    parser.add_argument("count", metavar="N", type=int, help="which call of it")
    parser.add_argument("--light", type=float, metavar="SECONDS", help="work without torch; each piece takes so long")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of light work, a copy of each result goes there")
    parser.add_argument("--stop-at", nargs=2, action="append", default=[], metavar="POINT N", help="SIGSTOP there")
    parser.add_argument("--record", type=Path, metavar="FILE", help="every message that comes in goes there as well")
    parser.add_argument("--set-back", type=float, metavar="SECONDS", help="at the point set the clock back instead")
    parser.add_argument("--patience", type=float, metavar="SECONDS", help="a coordinator waits so long for a vector")
    parser.add_argument("--obedient", action="store_true", help="root, too, writes only where its files' modes let it")
    parser.add_argument("command", nargs="+", metavar="ARGUMENTS", help="of parley")
    given = parser.parse_args(arguments)
    _hurry()
    if given.obedient:
        _obey_modes()
    if given.light is not None:
        LightWork.pause, LightWork.keep = given.light, given.keep
        client.agent.Trainer = LightWork  # type: ignore[assignment,misc] - stands in its place
    for point, count in given.stop_at:
        Point.parse(point, int(count)).arm(stand_still)
    if given.patience is not None:
        conduct.Patience = partial(Patience, again=given.patience, upload=given.patience)  # type: ignore[assignment,misc] - stands in its place
    if given.record is not None:
        _record(given.record.open("ab", buffering=0))
    if given.point != "never":
        strike = _die if given.set_back is None else lambda: _set_back(given.set_back)
        Point.parse(given.point, given.count).arm(strike)
    sys.argv = ["parley", *given.command]
    parley_main()


def stand_still() -> None:
    """Stops this process here, until it is told to go on.

    The signal is this thread's. One for the whole process may go to another thread: this one would run on meanwhile,
    and a second stop, sent before the first took place, would be one with it.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _record(file: RawIOBase) -> None:
    """From now on every message that a coordinator takes from the wire is put into the file, as it came."""

    def recorded(decode: Callable[..., object]) -> Callable[..., object]:
        def record(*arguments: Any) -> object:
            file.write(arguments[-1])
            return decode(*arguments)

        return record

    for name in ("decode", "decode_from_site", "decode_upload_request", "decode_operator_request"):
        setattr(codec, name, recorded(getattr(codec, name)))


def _set_back(seconds: float) -> None:
    right = time.time
    time.time = lambda: right() - seconds


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _obey_modes() -> None:
    """Gives up root's right to read and write what a file's mode forbids: capabilities(7), CAP_DAC_*."""
    library = ctypes.CDLL(None, use_errno=True)
    header, held = _CapabilityHeader(0x20080522, 0), (_Capabilities * 2)()
    library.capget(ctypes.byref(header), held)
    for kind in ("effective", "permitted"):
        setattr(held[0], kind, getattr(held[0], kind) & ~0b110)
    if library.capset(ctypes.byref(header), held) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _hurry() -> None:
    """Makes the product's waits short, and its chunks small enough for a payload to have several."""
    seconds = Backoff.seconds
    Backoff.seconds = lambda self: seconds(self) / 10  # type: ignore[method-assign]
    coordinator.worker._RETRY_SECONDS = _PATIENCE
    coordinator.store.Store.__init__.__kwdefaults__["patience"] = _PATIENCE
    blobs.CHUNK = _CHUNK


if __name__ == "__main__":
    main(sys.argv[1:])
