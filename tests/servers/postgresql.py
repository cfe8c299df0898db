"""A PostgreSQL server of the tests' own: real, durable, never root's, and gone with the process that started it."""

import contextlib
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

__all__ = ["PASSWORD", "REQUIRED", "USER", "PostgreSQL", "binaries", "missing", "running"]

USER = "parley"
PASSWORD = "swordfish"  # noqa: S105 - of a server that lives for one test run, on loopback
REQUIRED = "PARLEY_REQUIRE_POSTGRESQL"

_SECONDS = 60
_PLACES = ("/usr/lib/postgresql", "/usr/local/lib/postgresql", "/opt/homebrew/opt", "/usr/local/pgsql")
_INIT = (
    *("--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C"),
    "--no-sync",  # of the files that initdb makes; the server itself syncs every commit
)
_ENGLISH = ("--locale-provider=icu", "--icu-locale=en-US")
"""Sorts words as people do, not as bytes: what SQLite sorts, such a database sorts otherwise. Since PostgreSQL 15."""

_SETTINGS = """
listen_addresses = '127.0.0.1'
fsync = on
shared_buffers = 16MB
max_connections = 40
log_min_messages = fatal
autovacuum = off
wal_level = minimal
max_wal_senders = 0
"""


@dataclass(frozen=True)
class PostgreSQL:
    """A server in `folder`: trust on its socket there, passwords on loopback."""

    programs: Path
    folder: Path
    port: int
    owner: str | None
    names: Iterator[int] = field(default_factory=itertools.count)

    @property
    def data(self) -> Path:
        """The server's files."""
        return self.folder / "data"

    def url(self, database: str) -> str:
        """A database's URL, over the socket and without a password."""
        return f"postgresql://{USER}@/{database}?host={self.folder}&port={self.port}"

    def url_over_tcp(self, database: str, user: str = USER, password: str = PASSWORD, port: int | None = None) -> str:
        """A database's URL, over loopback and with a password."""
        return f"postgresql://{user}:{password}@127.0.0.1:{port or self.port}/{database}"

    def database(self, like: str = "template0", options: str = "") -> str:
        """The name of a new database, a copy of another one."""
        name = f"test_{next(self.names)}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {like} {options}")
        return name

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """What a statement gives, outside of any transaction."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            found = connection.execute(statement)
            return found.fetchall() if found.description else []

    def configure(self, name: str, value: str) -> None:
        """Returns when the server's setting has this value."""
        with self.data.joinpath("postgresql.conf").open("a") as settings:
            settings.write(f"{name} = {value}\n")
        self._run("pg_ctl", "-D", self.data, "reload")
        while self.sql(f"SHOW {name}") != [(value,)]:
            pass

    def start(self) -> None:
        """Returns when the server takes connections."""
        self._run("pg_ctl", "-D", self.data, "-w", "-l", self.folder / "log", "-o", f"-p {self.port}", "start")

    def stop(self, mode: str = "immediate") -> None:
        """Returns when the server is gone; `immediate` is a crash, after which it recovers."""
        self._run("pg_ctl", "-D", self.data, "-w", "-m", mode, "stop")

    def make(self) -> None:
        """Makes the server's files."""
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        if self.owner is not None:
            shutil.chown(self.folder, self.owner)
            shutil.chown(secret, self.owner)
        version = int(self._run("postgres", "--version").split()[2].partition(".")[0])
        english = _ENGLISH if version >= 15 else ()
        self._run("initdb", "-D", self.data, "-U", USER, f"--pwfile={secret}", *_INIT, *english)
        with (self.data / "postgresql.conf").open("a") as settings:
            settings.write(f"{_SETTINGS}unix_socket_directories = '{self.folder}'\n")

    def guarded(self) -> subprocess.Popen[bytes]:
        """A process that stops the server and removes its files when our end of its input closes, also by our death."""
        script = 'cat >/dev/null; "$1" -D "$2" -m immediate stop >/dev/null 2>&1; rm -rf "$3"'
        command: list[str | Path] = ["/bin/sh", "-c", script, "guard", self.programs / "pg_ctl", self.data, self.folder]
        return self._popen(command, stdin=subprocess.PIPE)

    def _run(self, program: str, *arguments: object) -> str:
        # to a file: a started server keeps the descriptors that it inherits, and a pipe would never end
        with tempfile.TemporaryFile("w+") as told:
            running = self._popen([self.programs / program, *map(str, arguments)], stdout=told, stderr=told)
            status = running.wait(_SECONDS)
            told.seek(0)
            output = told.read()
        if status != 0:
            raise RuntimeError(f"{program} failed: {output}")
        return output

    def _popen(
        self,
        command: list[str | Path],
        *,
        stdin: int | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a program as the server's owner, with none of the environment's words on servers or languages."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=self.folder,
            env=environment | {"LC_ALL": "C"},
            user=self.owner,
            group=None if self.owner is None else pwd.getpwnam(self.owner).pw_gid,
            extra_groups=None if self.owner is None else [],
            start_new_session=True,
        )


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL server's programs here."""
    found = [program.parent for place in _PLACES for program in Path(place).glob("**/bin/initdb")]
    found.sort(key=lambda folder: [int(digits) for digits in folder.parent.name.split(".") if digits.isdigit()])
    config = shutil.which("pg_config")
    if config is not None:
        asked = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.insert(0, Path(asked.stdout.strip()))
    path = shutil.which("initdb")
    if path is not None:
        found.insert(0, Path(path).parent)
    whole = [folder for folder in found if all((folder / name).exists() for name in ("initdb", "pg_ctl", "postgres"))]
    return whole[-1] if whole else None


def missing() -> str:
    """Why no server can be started here; empty when one can."""
    try:
        import psycopg  # noqa: F401 - asks whether it is there
    except ImportError as absent:
        return f"psycopg cannot be used: {absent}"
    if binaries() is None:
        return "no PostgreSQL server is installed: no initdb, pg_ctl and postgres in /usr/lib/postgresql or PATH"
    if os.geteuid() == 0 and _service_user() is None:
        return "PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it as"
    return ""


@contextlib.contextmanager
def running() -> Iterator[PostgreSQL]:
    """A server until the block ends; skips the test where there can be none, or fails it when one is required."""
    reason = missing()
    if reason and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1 is set, and {reason}")
    programs = binaries()
    if reason or programs is None:
        pytest.skip(reason)
    owner = _service_user() if os.geteuid() == 0 else None
    server = PostgreSQL(programs, Path(tempfile.mkdtemp(prefix="parley-postgresql-")), _free_port(), owner)
    try:
        server.make()
    except BaseException:
        shutil.rmtree(server.folder, ignore_errors=True)
        raise
    guard = server.guarded()
    try:
        server.start()
        yield server
    finally:
        guard.communicate()
        shutil.rmtree(server.folder, ignore_errors=True)


def _service_user() -> str | None:
    known = {user.pw_name for user in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in known), None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
