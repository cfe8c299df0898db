import resource
import subprocess
import sys
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.limits import BURST, CALLS, MESSAGES_PER_SECOND, Limits
from federation.errors import RemoteProtocolError, WhoActs

_RAISED = """
import resource
from coordinator.limits import raise_file_limit
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_process_may_open_as_many_files_as_its_administrator_allows() -> None:
    """The soft limit becomes the hard one."""
    said = subprocess.run([sys.executable, "-c", _RAISED], check=True, capture_output=True, text=True).stdout
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert said.split() == [str(most), str(most)]


def _passes(limits: Limits, name: str, now: float) -> bool:
    try:
        limits.message(name, now)
    except RemoteProtocolError:
        return False
    return True


def test_a_peer_that_says_too_much_is_told_who_must_act() -> None:
    """The burst passes; what comes after it at once does not, whatever stream it comes on; others are not touched."""
    limits = Limits()
    for _ in range(int(BURST)):
        limits.message("a", 0.0)
    with pytest.raises(RemoteProtocolError) as refused:
        limits.message("a", 0.0)
    assert refused.value.problem == "a sends more than 1000 messages a second"
    assert refused.value.fix == "install this release of Parley at a; if that is no cure, have its membership revoked"
    assert refused.value.who is WhoActs.SITE
    with pytest.raises(RemoteProtocolError, match="more than 1000 messages"), limits.call("a", 0.0):
        pass
    limits.message("b", 0.0)


def test_silence_earns_messages_up_to_the_burst() -> None:
    """One second earns a second's worth; a year earns no more than the burst."""
    limits = Limits()
    assert sum(_passes(limits, "a", 0.0) for _ in range(10_000)) == BURST
    assert sum(_passes(limits, "a", 1.0) for _ in range(10_000)) == MESSAGES_PER_SECOND
    assert sum(_passes(limits, "a", 3e7) for _ in range(10_000)) == BURST


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=200))
@settings(deadline=None, max_examples=30)
def test_no_pattern_of_messages_passes_more_than_burst_and_rate_allow(pauses: list[float]) -> None:
    """Over any time."""
    limits, now, passed = Limits(), 0.0, 0
    for pause in pauses:
        now += pause
        passed += sum(_passes(limits, "a", now) for _ in range(400))
    assert passed <= BURST + MESSAGES_PER_SECOND * now + 1


def test_a_peer_holds_so_many_calls_open_and_no_more() -> None:
    """One that ends makes room; another peer has room of its own."""
    limits = Limits()
    with ExitStack() as held:
        for _ in range(CALLS):
            held.enter_context(limits.call("a", 0.0))
        with pytest.raises(RemoteProtocolError) as refused, limits.call("a", 0.0):
            pass
        assert refused.value.problem == "a holds 16 calls open already"
        assert refused.value.fix == "end what is not used; lost connections are given up after a minute"
        with limits.call("b", 0.0):
            pass
    with limits.call("a", 0.0):
        pass
