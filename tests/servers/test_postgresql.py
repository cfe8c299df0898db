"""Where no PostgreSQL server can be started, tests that need one say why; where one is required, they fail."""

import pytest

from tests.servers import postgresql
from tests.servers.postgresql import REQUIRED, running


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without PostgreSQL's programs."""
    monkeypatch.setattr(postgresql, "binaries", lambda: None)


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_server_skips_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the programs and where they were looked for."""
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no PostgreSQL server is installed: no initdb"), running():
        pass


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_server_fails_where_one_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that must not be skipped sets the variable."""
    monkeypatch.setenv(REQUIRED, "1")
    told = f"{REQUIRED}=1 is set, and no PostgreSQL server is installed"
    with pytest.raises(pytest.fail.Exception, match=told), running():
        pass
