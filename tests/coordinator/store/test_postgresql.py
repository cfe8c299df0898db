"""What only a server can be asked for, and how it is refused: in words that say what to do, and without passwords."""

import socket
from collections.abc import Callable

import pytest

from coordinator.records import JobRecord, SitePresence
from coordinator.store import Store, StoreReader
from federation.errors import StorageError
from tests.servers.postgresql import PASSWORD, PostgreSQL

HERE = SitePresence("cleveland", connected=True, last_seen=6.0, state="training")


def refusal(open_: Callable[[], object]) -> str:
    """How opening is refused; no password is in it."""
    with pytest.raises(StorageError) as refused:
        open_()
    assert PASSWORD not in str(refused.value)
    return str(refused.value)


@pytest.mark.usefixtures("postgresql")
def test_a_server_that_does_not_run_is_told() -> None:
    """The message names the server, not the secret in its URL."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        told = refusal(lambda: Store(f"postgresql://parley:{PASSWORD}@127.0.0.1:{port}/parley?sslpassword={PASSWORD}"))
    assert f"the store postgresql://parley:***@127.0.0.1:{port}/parley does not answer: no server runs there" in told
    assert "start PostgreSQL, or correct host and port in the URL" in told


def test_a_socket_without_a_server_is_told(postgresql: PostgreSQL) -> None:
    """A server's folder in which none listens."""
    told = refusal(lambda: Store(f"postgresql://parley@/parley?host={postgresql.folder}&port=1"))
    assert "does not answer: no server runs there" in told


@pytest.mark.parametrize("open_", [Store, StoreReader])
def test_a_wrong_password_is_told(postgresql: PostgreSQL, migrated: str, open_: type[StoreReader]) -> None:
    """The wrong one is not repeated, nor is the right one."""
    told = refusal(lambda: open_(postgresql.url_over_tcp(migrated, password="sword-fish")))  # noqa: S106 - the point
    assert "refuses this user's password" in told
    assert "put the right one into ~/.pgpass, PGPASSWORD or the URL" in told
    assert "sword-fish" not in told


def test_the_right_password_opens_the_store(postgresql: PostgreSQL, migrated: str, postgresql_url: str) -> None:
    """Over loopback as over the socket."""
    with Store(postgresql.url_over_tcp(migrated)) as store:
        store.set_presence((HERE,))
    with StoreReader(postgresql_url) as reader:
        assert reader.presence() == (HERE,)


def test_an_unknown_user_is_told(postgresql: PostgreSQL, migrated: str) -> None:
    """A role that the server does not have."""
    told = refusal(lambda: Store(postgresql.url(migrated).replace("parley@", "nobody@")))
    assert "does not know this user" in told
    assert "create the role" in told


def test_a_missing_database_is_told(postgresql: PostgreSQL) -> None:
    """With the command that makes it."""
    told = refusal(lambda: Store(postgresql.url("nowhere")))
    assert "/nowhere" in told
    assert "does not exist" in told
    assert "createdb --encoding=UTF8 --template=template0 NAME" in told


def test_a_user_without_rights_is_told(postgresql: PostgreSQL) -> None:
    """A role that may connect and not make tables."""
    postgresql.sql(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
    url = postgresql.url_over_tcp(postgresql.database(), user="guest")
    postgresql.sql("REVOKE CREATE ON SCHEMA public FROM PUBLIC", url.rpartition("/")[2])
    told = refusal(lambda: Store(url))
    assert "does not let this user make or change tables" in told
    assert "grant it CREATE on the schema" in told


def test_a_database_that_cannot_hold_every_text_is_refused(postgresql: PostgreSQL) -> None:
    """A site's words may be in any language."""
    latin = postgresql.database(options="ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
    told = refusal(lambda: Store(postgresql.url(latin)))
    assert "cannot hold every text: its encoding is LATIN1" in told


def test_a_server_that_forgets_is_refused(postgresql: PostgreSQL, postgresql_url: str) -> None:
    """Without fsync a power cut would take committed rounds back."""
    postgresql.configure("fsync", "off")
    try:
        assert "would lose rounds in a power cut: its server has fsync = off" in refusal(lambda: Store(postgresql_url))
    finally:
        postgresql.configure("fsync", "on")
    Store(postgresql_url).close()


def test_commits_are_durable_whatever_the_database_says(postgresql: PostgreSQL) -> None:
    """A database set to answer before its disk has the commit is not believed."""
    name = postgresql.database()
    postgresql.sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
    with Store(postgresql.url(name)) as store, store._writer.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    postgresql.sql(f"ALTER DATABASE {name} SET synchronous_commit = remote_apply")
    with Store(postgresql.url(name)) as store, store._writer.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "remote_apply"


def test_a_standby_is_told(postgresql: PostgreSQL, job: Callable[[], JobRecord]) -> None:
    """A server that only reads refuses the write, and the primary is asked for."""
    name = postgresql.database()
    with Store(postgresql.url(name)) as store:
        store.add_job(job())
    postgresql.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with Store(postgresql.url(name)) as store:
        with pytest.raises(StorageError, match=r"cannot be written: it is a standby.*URL of the primary"):
            store.set_presence((HERE,))
        assert store.job("heart-1") == job()


def test_a_server_without_a_free_connection_is_told(postgresql: PostgreSQL, migrated: str) -> None:
    """Other programs may take them all."""
    postgresql.sql("CREATE ROLE single LOGIN SUPERUSER CONNECTION LIMIT 0")
    postgresql.sql("ALTER ROLE single NOSUPERUSER")
    told = refusal(lambda: Store(postgresql.url(migrated).replace("parley@", "single@")))
    assert "has no connection left" in told
