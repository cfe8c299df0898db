"""The audit log loses nothing silently, and whatever is changed in it is found and named."""

import base64
import errno
import hashlib
import json
import os
import resource
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation import audit
from federation.audit import FILE, MOST, AuditLog, Break, BrokenLogError, LogName, Verdict, entries, verify
from federation.errors import LocalProtocolError, StorageError

NAME = LogName("cleveland", "site")
CONTENTS = (b"", b"\x00\xff a message", b"line\nfeed", b"x" * 200)

property_test = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # a log that a test changes is written anew in each example


def opened(path: Path, at: float = 1000.0) -> AuditLog:
    """The member's log, to append to."""
    return AuditLog(path, NAME, at)


def filled(path: Path, contents: Sequence[bytes] = CONTENTS) -> list[bytes]:
    """Makes a log of these entries, a second between two of them; its lines."""
    with opened(path) as log:
        for number, content in enumerate(contents, 1):
            log.append("sent", content, 1000.0 + number)
    return path.read_bytes().splitlines(keepends=True)


def rendered(line: bytes, **changes: object) -> bytes:
    """A line with other fields and the digest that belongs to them, as a careful forger writes it."""
    held = json.loads(line) | changes
    del held["digest"]
    body = json.dumps(held, separators=(",", ":"))[:-1].encode()
    return body + f',"digest":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log is."""
    return tmp_path / "site" / FILE


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of a log that was written once, for tests that change them."""
    return filled(tmp_path_factory.mktemp("log") / FILE)


# -------------------------------------------------------------------------------------------------------- what is kept


def test_what_is_appended_is_read_back_in_order(path: Path) -> None:
    """Line by line, after the one that names the log."""
    filled(path)
    first, *found = entries(path)
    assert (first.line, first.kind, first.at, first.before) == (1, "log", 1000.0, bytes(32))
    assert [(each.line, each.kind, each.at, each.content) for each in found] == [
        (number + 1, "sent", 1000.0 + number, content) for number, content in enumerate(CONTENTS, 1)
    ]
    assert [each.before for each in found] == [first.digest, *(each.digest for each in found[:-1])]


def test_a_log_goes_on_after_a_restart(path: Path) -> None:
    """Line and head are taken up where they were left, and nothing is written by opening alone."""
    filled(path)
    before = path.read_bytes()
    with opened(path, 2000.0) as log:
        assert path.read_bytes() == before
        assert (log.lines, log.head) == (5, verify(path).head)
        log.append("received", b"later", 2001.0)
        assert (log.lines, log.head) == (6, verify(path).head)
    assert verify(path) == Verdict(NAME, lines=6, head=log.head, at=2001.0)


@property_test
@given(st.lists(st.lists(st.binary(max_size=300), max_size=4), max_size=4))
def test_every_content_comes_back_and_every_log_is_whole(tmp_path: Path, batches: list[list[bytes]]) -> None:
    """Whatever the bytes, in one go or several."""
    path = tmp_path / FILE
    path.unlink(missing_ok=True)
    for batch in batches:
        with opened(path) as log:
            log.extend((("sent", each) for each in batch), 1000.0)
    if not batches:
        opened(path).close()
    assert [each.content for each in entries(path)][1:] == [each for batch in batches for each in batch]
    assert verify(path).whole


def test_an_entry_is_durable_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last thing done is the file's fsync, with the whole line in it; so it is for several lines at once."""
    done: list[bytes] = []
    sync = os.fsync
    with opened(path) as log:

        def note(descriptor: int) -> None:
            done.append(path.read_bytes())
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", note)
        log.append("sent", b"one", 1001.0)
        assert done == [path.read_bytes()]
        log.extend([("sent", b"two"), ("received", b"three")], 1002.0)
        assert done[1:] == [path.read_bytes()]


def test_the_log_is_its_members_alone(path: Path) -> None:
    """No other user of the machine reads it."""
    filled(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_log_is_read_a_line_at_a_time(path: Path) -> None:
    """Walking twelve mebibytes never holds more than a few lines of one."""
    filled(path, [bytes(MOST)] * 12)
    tracemalloc.start()
    assert verify(path).lines == 13
    assert sum(len(each.content) for each in entries(path)) > 12 * MOST
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_progress_is_told_to_the_last_byte(path: Path) -> None:
    """Each mebibyte or so, ascending, and the whole at the end."""
    filled(path, [bytes(MOST)] * 3)
    told: list[int] = []
    verify(path, progress=told.append)
    assert told == sorted(told)
    assert len(told) == 4
    assert told[-1] == path.stat().st_size


def test_times_that_run_backwards_are_taken_and_counted(path: Path) -> None:
    """A clock may be set; the log is whole, and says where."""
    with opened(path) as log:
        for at in (1005.0, 1003.0, 1004.0, 900.5):
            log.append("sent", b"", at)
    verdict = verify(path)
    assert verdict.whole
    assert (verdict.backwards, verdict.first_backwards, verdict.at) == (2, 3, 900.5)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", ["", "Sent", "sent message", "9", "log", "torn", "a" * 33, "é", 'a","x":"'])
def test_a_kind_that_cannot_be_is_refused(path: Path, kind: str) -> None:
    """A kind is a short word, and not one that the log itself uses."""
    with opened(path) as log, pytest.raises(LocalProtocolError, match="an entry cannot be of the kind"):
        log.extend([("sent", b""), (kind, b"")], 1001.0)
    assert verify(path).lines == 1


def test_too_large_a_content_is_refused(path: Path) -> None:
    """A line stays readable in one go."""
    with opened(path) as log:
        log.append("sent", bytes(MOST), 1001.0)
        with pytest.raises(LocalProtocolError, match=f"at most {MOST} bytes, not {MOST + 1}"):
            log.append("sent", bytes(MOST + 1), 1001.0)
    assert verify(path).lines == 2


@pytest.mark.parametrize("at", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_time_that_cannot_be_is_refused(path: Path, at: float) -> None:
    """At opening and in entries."""
    with pytest.raises(LocalProtocolError, match="is no time in Unix seconds"):
        opened(path, at)
    assert not path.exists()
    with opened(path) as log, pytest.raises(LocalProtocolError, match="is no time in Unix seconds"):
        log.append("sent", b"", at)


def test_a_closed_log_takes_nothing(path: Path) -> None:
    """It may be closed twice."""
    log = opened(path)
    log.close()
    log.close()
    with pytest.raises(LocalProtocolError, match=r"an entry was to be added to .*, which is closed"):
        log.append("sent", b"", 1001.0)


def test_a_second_writer_is_refused(path: Path) -> None:
    """Two would break the chain; readers are not kept out, and when the first has ended the next may write."""
    with opened(path):
        with pytest.raises(StorageError, match=r"another process appends to .* already.*let that one run, or end it"):
            opened(path)
        assert verify(path).whole
    opened(path).close()


def test_a_second_process_is_refused(path: Path) -> None:
    """Whichever program it is."""
    code = (
        "from pathlib import Path\n"
        "from federation.audit import AuditLog, LogName\n"
        f"AuditLog(Path({str(path)!r}), {NAME!r}, 1.0)"
    )
    with opened(path):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process appends to" in second.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_members_log_is_refused(path: Path) -> None:
    """By member and by purpose."""
    filled(path)
    for name in (LogName("zurich", "site"), LogName("cleveland", "coordinator")):
        with pytest.raises(StorageError, match=r"is the log of cleveland \(site\), not of .*name another file"):
            AuditLog(path, name, 2000.0)


def test_a_log_that_somebody_else_writes_to_is_left_alone(path: Path) -> None:
    """What stands behind the last line was not written by this process."""
    with opened(path) as log:
        with path.open("ab") as other:
            other.write(b"x")
        with pytest.raises(StorageError, match=r"somebody else has changed .*parley audit verify"):
            log.append("sent", b"", 1001.0)


def test_a_log_broken_at_its_end_is_not_gone_on_with(path: Path) -> None:
    """Nothing can be chained to a line that is not what it was."""
    *lines, last = filled(path)
    path.write_bytes(b"".join(lines) + last.replace(b"1004.0", b"1005.0"))
    with pytest.raises(StorageError, match=r"the last line of .* is broken: expected the digest .*a new log begins"):
        opened(path)


def test_a_log_that_does_not_say_whose_it_is_is_not_gone_on_with(path: Path) -> None:
    """Its first line is not the one that names a log."""
    _, *lines = filled(path)
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        BrokenLogError, match=r"line 1 is broken: expected the entry written as line 1, found .* line 2"
    ):
        opened(path)


def test_a_log_that_is_not_there_is_told(tmp_path: Path) -> None:
    """And so is one that cannot be read."""
    with pytest.raises(StorageError, match=r"there is no audit log .*none"):
        verify(tmp_path / "none")
    with pytest.raises(StorageError, match=r"cannot read .*: Is a directory"):
        next(entries(tmp_path))
    with pytest.raises(StorageError, match=r"the disk does not take .*: Is a directory"):
        opened(tmp_path)


# ------------------------------------------------------------------------------------------------------ full disks


def test_a_full_disk_leaves_the_chain_whole(path: Path) -> None:
    """The system takes half a line and no more: the entry is refused, the half is taken back, and the log goes on."""
    with opened(path) as log:
        log.append("sent", b"before", 1001.0)
        before = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
        try:
            with pytest.raises(StorageError, match=r"the disk does not take .*: File too large.*free disk space"):
                log.append("sent", b"too much", 1002.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        log.append("sent", b"after", 1003.0)
    assert [each.content for each in entries(path)][1:] == [b"before", b"after"]


def test_entries_that_are_not_durable_are_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk takes them and then says that it did not."""
    with opened(path) as log:
        before = path.read_bytes()
        sync, answers = os.fsync, [OSError(errno.EIO, "Input/output error")]

        def once(descriptor: int) -> None:
            if answers:
                raise answers.pop()
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", once)
        with pytest.raises(StorageError, match="Input/output error"):
            log.extend([("sent", b"one"), ("sent", b"two")], 1001.0)
        assert path.read_bytes() == before
        log.append("sent", b"three", 1002.0)
    assert [each.content for each in entries(path)][1:] == [b"three"]


def test_what_cannot_be_taken_back_is_set_aside_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is closed, for what stands at its end is not known."""
    log = opened(path)
    with monkeypatch.context() as broken:
        broken.setattr(audit.os, "write", torn_after(40))
        broken.setattr(audit.os, "ftruncate", failing)
        with pytest.raises(StorageError, match="No space left on device"):
            log.append("sent", b"lost", 1001.0)
    with pytest.raises(LocalProtocolError, match="which is closed"):
        log.append("sent", b"", 1002.0)
    opened(path).close()
    assert [each.kind for each in entries(path)] == ["log", "torn"]


def failing(*_: object) -> int:
    """A call that a full disk refuses."""
    raise OSError(errno.ENOSPC, "No space left on device")


def torn_after(size: int) -> Callable[[int, memoryview], int]:
    """A write that stops after so many bytes, and then fails."""
    left, write = [size], os.write

    def torn(descriptor: int, content: memoryview) -> int:
        if not left[0]:
            return failing()
        written = write(descriptor, content[: left[0]])
        left[0] -= written
        return written

    return torn


# ---------------------------------------------------------------------------------------------------------- crashes


@property_test
@given(st.data())
def test_a_torn_line_is_set_aside_and_noted_and_the_chain_goes_on(
    tmp_path: Path, written: list[bytes], data: st.DataObject
) -> None:
    """Wherever in its last line a crash cut the log, also in the line that names it."""
    path, lines = tmp_path / FILE, written
    whole = data.draw(st.integers(0, len(lines) - 1), label="whole lines")
    cut = data.draw(st.integers(1, len(lines[whole]) - 1), label="bytes of the next")
    torn = lines[whole][:cut]
    path.write_bytes(b"".join(lines[:whole]) + torn)
    assert verify(path).broken is not None
    with opened(path, 5000.0) as log:
        log.append("sent", b"on", 5001.0)
    found = list(entries(path))
    assert verify(path).whole
    assert [each.content for each in found[1 : max(whole, 1)]] == list(CONTENTS[: max(whole, 1) - 1])
    note = json.loads(found[-2].content)
    assert (found[-2].kind, found[-1].content) == ("torn", b"on")
    assert note == {"bytes": cut, "sha256": hashlib.sha256(torn).hexdigest(), "kept": note["kept"]}
    assert (tmp_path / note["kept"]).read_bytes() == torn


@property_test
@given(cut=st.integers(1, 200), taken=st.integers(0, 400))
def test_a_crash_while_a_torn_line_is_set_aside_loses_nothing(
    tmp_path: Path, written: list[bytes], cut: int, taken: int
) -> None:
    """Its bytes are in a file of their own before anything is written over them."""
    path, (*lines, last) = tmp_path / FILE, written
    for earlier in tmp_path.iterdir():
        earlier.unlink()
    torn = last[:cut]
    path.write_bytes(b"".join(lines) + torn)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(audit, "files", _Files(os.write))
        broken.setattr(audit.os, "write", torn_after(taken))
        try:
            opened(path, 5000.0).close()
        except StorageError as full:
            assert "No space left on device" in str(full)  # noqa: PT017 - a crash late enough does not show
    opened(path, 5001.0).close()
    assert verify(path).whole
    kept = [json.loads(each.content)["kept"] for each in entries(path) if each.kind == "torn"]
    assert kept
    asides = [each.read_bytes() for each in tmp_path.glob(f"{FILE}.torn-*")]
    assert torn in asides
    assert {hashlib.sha256(each).hexdigest()[:16] for each in asides} >= {each.rsplit("-", 1)[1] for each in kept}


class _Files:
    """Writes small files on a disk that is not full."""

    def __init__(self, write: Callable[[int, bytes], int]) -> None:
        self._write = write

    def write(self, path: Path, content: bytes, *, secret: bool) -> None:
        """As `files.write` does."""
        assert secret
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._write(descriptor, content)
        os.close(descriptor)


def test_a_file_made_and_not_written_becomes_a_log(path: Path) -> None:
    """A crash may leave it empty."""
    path.parent.mkdir()
    path.touch()
    assert verify(path).broken == Break(1, "the line that names the log", "an empty file")
    opened(path).close()
    assert verify(path).whole


# ---------------------------------------------------------------------------------------------------------- tampering


@property_test
@given(st.data())
def test_any_changed_byte_is_found_and_its_line_named(
    tmp_path: Path, written: list[bytes], data: st.DataObject
) -> None:
    """Also the end of a line, also into one, also in the last line, which nothing follows."""
    path, whole = tmp_path / FILE, b"".join(written)
    place = data.draw(st.integers(0, len(whole) - 1), label="place")
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[place]), label="byte")
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    broken = verify(path).broken
    assert broken is not None
    assert broken.line == whole[:place].count(b"\n") + 1
    assert broken.expected != broken.found
    with pytest.raises(BrokenLogError, match=f"line {broken.line} is broken: expected .*, found "):
        list(entries(path))


@property_test
@given(st.data())
def test_a_line_removed_doubled_or_moved_is_found_and_named(
    tmp_path: Path, written: list[bytes], data: st.DataObject
) -> None:
    """By the first line that is not what it was; the last alone can be cut off unseen by the chain."""
    path, lines = tmp_path / FILE, written
    first, second = sorted(data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True), label="lines"))
    done, broken = data.draw(
        st.sampled_from(
            [
                ([*lines[:first], *lines[first + 1 :]], first),
                ([*lines[: second + 1], *lines[second:]], second + 1),
                ([*lines[: second + 1], lines[first], *lines[second + 1 :]], second + 1),
                (
                    [*lines[:first], lines[second], *lines[first + 1 : second], lines[first], *lines[second + 1 :]],
                    first,
                ),
            ]
        ),
        label="done",
    )
    path.write_bytes(b"".join(done))
    verdict = verify(path)
    assert verdict.broken is not None
    assert (verdict.broken.line, verdict.lines) == (broken + 1, broken)
    assert "lines were removed, added or moved" in verdict.broken.found


def test_a_line_with_a_digest_of_its_own_is_found_in_the_next(path: Path) -> None:
    """The chain holds what a digest in the line itself cannot."""
    lines = filled(path)
    lines[2] = rendered(lines[2], content=base64.b64encode(b"other").decode())
    path.write_bytes(b"".join(lines))
    broken = verify(path).broken
    assert broken is not None
    assert broken.line == 4
    assert broken.expected == f"an entry that follows {json.loads(lines[2])['digest']}"
    assert broken.found == f"one that follows {json.loads(lines[3])['before']}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"content": "a"}, "a time, and content in base64"),
        ({"content": "{}"}, "an entry of an audit log"),
        ({"at": "1"}, "an entry of an audit log"),
        ({"kind": "Sent"}, "an entry of an audit log"),
        ({"more": 1}, "an entry of an audit log"),
    ],
)
def test_a_line_that_is_no_entry_is_broken_whatever_its_digest(
    path: Path, changes: dict[str, object], expected: str
) -> None:
    """Nothing is read that `append` would not have written."""
    lines = filled(path)
    path.write_bytes(b"".join([*lines[:-1], rendered(lines[-1], **changes)]))
    broken = verify(path).broken
    assert broken is not None
    assert (broken.line, broken.expected) == (5, expected)


def test_a_line_without_end_is_not_read_whole(path: Path) -> None:
    """However long it is."""
    filled(path)
    with path.open("ab") as file:
        file.write(b"x" * 3 * MOST)
    broken = verify(path).broken
    assert broken is not None
    assert broken.line == 6
    assert broken.found == f"{audit._LONGEST + 1} bytes and no end: longer than any entry"


@pytest.mark.parametrize("at", [b"1.0.0", b"1e999", b"1e12", b"-1.0"])
def test_what_is_no_time_is_broken(path: Path, at: bytes) -> None:
    """Its digest may be right."""
    lines = filled(path)
    body = lines[-1][: lines[-1].index(b',"digest"')].replace(b"1004.0", at)
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(b"".join(lines[:-1]) + body + b',"digest":"' + digest + b'"}\n')
    broken = verify(path).broken
    assert broken is not None
    assert (broken.line, broken.expected) == (5, "a time, and content in base64")


@pytest.mark.parametrize(
    "named",
    [
        b"{}",
        b"[1",
        b"[" * 100_000,
        b'{"format":"parley-audit-2","member":"a","purpose":"b"}',
        b'{"format":"parley-audit-1"}',
    ],
)
def test_a_first_line_that_names_no_log_is_broken(path: Path, named: bytes) -> None:
    """Another format is another program's."""
    lines = filled(path)
    path.write_bytes(rendered(lines[0], content=base64.b64encode(named).decode()))
    verdict = verify(path)
    assert verdict.broken == Break(1, "the line that names a parley-audit-1", "an entry of the kind log")
    assert verdict.name is None


def test_only_a_noted_head_shows_a_cut_or_a_log_written_anew(path: Path) -> None:
    """The chain is whole in both; the line that was noted is gone."""
    lines = filled(path)
    noted = [bytes.fromhex(json.loads(line)["digest"]) for line in lines]
    assert [verify(path, each).noted_at for each in noted] == [1, 2, 3, 4, 5]
    path.write_bytes(b"".join(lines[:3]))
    assert [verify(path, each).noted_at for each in noted] == [1, 2, 3, None, None]
    assert verify(path, noted[4]).whole
    path.unlink()
    filled(path, [*CONTENTS[:2], b"other", *CONTENTS[3:]])
    assert [verify(path, each).noted_at for each in noted] == [1, 2, 3, None, None]
    assert verify(path, noted[4]).whole
