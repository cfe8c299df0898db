"""A site that attends like the real one, with its session and its I/O, but sends a prepared vector and never trains.

`python -m simulations.bare_site --vector FILE FOLDER...` attends once for each folder with a membership.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self, assert_never

import numpy as np

from client.agent import Agent
from client.connection import Line
from client.policy import example, parse
from client.session_events import SiteIdentity
from client.summing import Sealing
from client.training import protocol
from client.vault import Vault, vault_in, witness_in
from federation import audit, codec, plugins
from federation.job import parse as parse_job
from federation.messages import MembershipStatement, RevocationList, Role
from federation.vector import BLOCK, F32
from privacy import identity
from privacy.identity import MemberKeys, Root, RootCertificate
from tasks.task import Task  # noqa: TC001 - read by people first; costs nothing, it is torch-free

__all__ = ["PLAIN_POLICY", "Membership", "PreparedWork", "main", "prepare"]

PLAIN_POLICY = example(plain=True)
"""Of sites that run plain jobs on purpose, in benchmarks and on broken networks: the example but for one line."""

_FILE = "membership.json"
_ROWS = 100
"""Rows of the evaluation that a bare site makes up, and its weight: all such sites weigh the same."""
_TABLE = protocol.Table(hashlib.sha256(b"made up").hexdigest(), _ROWS, _ROWS, _ROWS // 2)
"""What a bare site says under secure aggregation that it has read."""


@dataclass(frozen=True, slots=True)
class Membership:
    """All that a member needs to call the coordinator: who it is, and its line."""

    me: SiteIdentity
    line: Line
    keys: MemberKeys = field(repr=False)

    @classmethod
    def sign(
        cls, root: Root, revocations: RevocationList, name: str, role: Role, *, address: str, coordinator: str, now: int
    ) -> Self:
        """A new member, signed by the root itself: the way of a benchmark, which holds both ends."""
        keys = MemberKeys.generate()
        certificate, statement = root.approve(identity.request_for(name, name, role, keys, "bare"), now)
        tls_name = identity.tls_name(coordinator, root.consortium)
        line = Line(address, tls_name, root.certificate_pem, certificate, keys.tls_pem, codec.encode(statement))
        return cls(SiteIdentity(statement, root.public, revocations), line, keys)

    def store(self, folder: Path) -> None:
        """Puts it into a file of `folder`, for `load`."""
        line = self.line
        content = {
            "address": line.address,
            "tls_name": line.tls_name,
            "root": line.root_certificate.decode(),
            "certificate": line.certificate.decode(),
            "tls_key": line.tls_key.decode(),
            "protocol_key": self.keys.protocol_pem.decode(),
            "statement": line.statement.hex(),
            "revocations": codec.encode(self.me.revocations).hex(),
        }
        file = folder / _FILE
        file.touch(mode=0o600)
        file.write_text(json.dumps(content, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The membership that `store` put into `folder`."""
        content = json.loads((folder / _FILE).read_text())
        root, certificate, key, protocol_key = (
            content[name].encode() for name in ("root", "certificate", "tls_key", "protocol_key")
        )
        encoded = bytes.fromhex(content["statement"])
        me = SiteIdentity(
            codec.decode(MembershipStatement, encoded),
            RootCertificate.parse(root),
            codec.decode(RevocationList, bytes.fromhex(content["revocations"])),
        )
        line = Line(content["address"], content["tls_name"], root, certificate, key, encoded)
        return cls(me, line, MemberKeys.load(key, protocol_key))


def prepare(path: Path, values: int) -> None:
    """Writes a vector for bare sites, small normal values and always the same ones; it is never whole in memory."""
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (values,)})
        for start in range(0, values, BLOCK):
            block = 0.01 * generator.standard_normal(min(BLOCK, values - start), dtype=np.float32)
            file.write(block.astype("<f4", copy=False).data)


class PreparedWork:
    """Stands where the trainer stands: every update is the prepared vector, every evaluation that of made-up rows.

    The vector's first value is the round's number, so that no two rounds send the same payload.

    Args:
        vector: The update [values]; kept, and changed in its first value. It may be mapped from a file, copy on write.
        secure: Whether its jobs are under secure aggregation, which asks what table was read.
    """

    def __init__(self, vector: F32, *, secure: bool = False) -> None:
        self._vector = vector
        self._table = _TABLE if secure else None

    async def ask(self, request: protocol.Request) -> protocol.Answer:
        """The trainer's answer to `request`, as far as it needs no data."""
        begun = time.perf_counter()
        match request:
            case protocol.Warm() | protocol.CheckData():
                return protocol.Done(table=self._table)
            case protocol.ComputeStatistics():
                return protocol.Failed("data", "a bare site has no rows: give the job a task without statistics")
            case protocol.Train():
                self._vector[0] = request.round_number
                content, length = self._vector.data, self._vector.size
            case protocol.Evaluate():
                counts = _evaluation(request.subject.job)
                content, length = counts.data, counts.size
            case _:
                assert_never(request)
        await asyncio.to_thread(Path(request.output).write_bytes, content)
        return protocol.Done(length, float(_ROWS), time.perf_counter() - begun, table=self._table)

    async def close(self) -> None:
        """Nothing is open."""


@lru_cache(maxsize=8)
def _evaluation(text: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The evaluation of made-up outputs, of the length that the job's task wants."""
    job = parse_job(text)
    task: Task = plugins.load("tasks", job.task.kind).make(job)
    outputs = np.random.default_rng(0).standard_normal((_ROWS, task.outputs)).astype(np.float32)
    return task.evaluate(outputs, np.arange(_ROWS) % max(2, task.outputs))


async def _attend(folder: Path, path: Path, *, secure: bool) -> None:
    member, policy = Membership.load(folder), parse(PLAIN_POLICY, "a bare site's policy")
    vector: F32 = np.load(path, mmap_mode="c")  # pages of the file, of which only the first is ever written to
    work = PreparedWork(vector, secure=secure)
    with contextlib.ExitStack() as open_files:
        sealing = open_files.enter_context(_sealing(folder, member)) if secure else None
        agent = Agent(folder, member.line, member.me, lambda: policy, lambda _: None, work, sealing)
        await agent.run()


@contextlib.contextmanager
def _sealing(folder: Path, member: Membership) -> Iterator[Sealing]:
    statement = member.me.statement
    with (
        Vault(vault_in(folder), witness_in(folder)) as vault,
        audit.AuditLog(folder / audit.FILE, audit.LogName(statement.name, statement.role.value), time.time()) as log,
    ):
        yield Sealing(member.keys.protocol, vault, log)


async def _attend_all(folders: list[Path], path: Path, *, secure: bool) -> None:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with asyncio.TaskGroup() as sites:
        for folder in folders:
            sites.create_task(_attend(folder, path, secure=secure))


def main() -> None:
    """Attends until it is told to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="holds a membership")
    parser.add_argument("--vector", required=True, type=Path, help="the update: a .npy file of float32 values")
    parser.add_argument("--secure", action="store_true", help="take part in jobs under secure aggregation as well")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(_attend_all(arguments.folders, arguments.vector, secure=arguments.secure))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
