"""Payloads are there whole or not at all, and an interrupted transfer goes on where it stopped."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.blobs import CHUNK, BlobRef, BlobStore
from federation.errors import RemoteProtocolError, StorageError

CONTENT = b"what a site computed" * 100
REF = BlobRef.of(CONTENT)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    """An empty store."""
    return BlobStore(tmp_path / "blobs")


def files(store: BlobStore) -> list[str]:
    """Names of all files in the store."""
    return sorted(path.name for path in store.folder.iterdir())


def test_put_gives_back_the_same_bytes_under_their_sha256(store: BlobStore) -> None:
    """What is put is got back, and its name is its SHA-256."""
    ref = store.put(CONTENT)
    assert (ref, ref.hex, store.get(ref), files(store)) == (REF, REF.digest.hex(), CONTENT, [REF.hex])


def test_putting_twice_keeps_one_file(store: BlobStore) -> None:
    """Equal content has one name and one file."""
    assert store.put(CONTENT) == store.put(memoryview(CONTENT))
    assert files(store) == [REF.hex]


def test_dropping_forgets_and_may_be_repeated(store: BlobStore) -> None:
    """A dropped payload is not there, and dropping it again does nothing."""
    ref = store.put(CONTENT)
    store.drop(ref)
    store.drop(ref)
    assert not store.has(ref)
    with pytest.raises(StorageError, match=r"payload .* is not in .*restore it from a backup"):
        store.get(ref)


@pytest.mark.parametrize("digest", [b"", b"short", bytes(33)])
def test_a_digest_of_another_length_names_nothing(digest: bytes) -> None:
    """A digest has 32 bytes."""
    with pytest.raises(RemoteProtocolError, match=f"must have 32 bytes, not {len(digest)}"):
        BlobRef(digest, 1)


@pytest.mark.parametrize("length", [-1, 2**63, True])
def test_an_impossible_length_names_nothing(length: int) -> None:
    """A payload's length is an integer from nothing to what a file can hold."""
    with pytest.raises(RemoteProtocolError, match=f"cannot have {length} bytes"):
        BlobRef(bytes(32), length)


@given(st.binary(max_size=300), st.lists(st.integers(1, 90), max_size=6), st.integers(0, 5))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_transfer_may_be_cut_and_continued_anywhere(
    tmp_path: Path, content: bytes, cuts: list[int], cut: int
) -> None:
    """Whatever the chunks and wherever the cut, the payload arrives whole."""
    store, ref = BlobStore(tmp_path / "cut"), BlobRef.of(content)
    store.drop(ref)
    for number, size in enumerate([*cuts, 1000]):
        incoming = store.receive(ref)
        incoming.append(content[incoming.offset : incoming.offset + size])
        if number == cut:
            incoming.pause()
            incoming = store.receive(ref)
        if incoming.offset == ref.length:
            assert incoming.finish() == store.path(ref)
            break
        incoming.pause()
    assert store.get(ref) == content


def test_an_interrupted_transfer_continues_at_its_offset(store: BlobStore) -> None:
    """The offset of a new transfer is what the last one left."""
    first = store.receive(REF)
    first.append(CONTENT[:700])
    first.pause()
    assert not store.has(REF)
    second = store.receive(REF)
    assert second.offset == 700
    second.append(CONTENT[700:])
    second.finish()
    assert store.get(REF) == CONTENT


def test_a_transfer_that_stops_short_is_told_where_to_continue(store: BlobStore) -> None:
    """A truncated payload is no payload, and its bytes are kept."""
    incoming = store.receive(REF)
    incoming.append(CONTENT[:11])
    with pytest.raises(RemoteProtocolError, match=r"of 2000 bytes stopped at 11.*continue from that offset"):
        incoming.finish()
    assert not store.has(REF)
    assert store.receive(REF).offset == 11


def test_bytes_past_the_declared_end_are_refused_and_forgotten(store: BlobStore) -> None:
    """Nobody can make the store hold more than was declared."""
    incoming = store.receive(REF)
    incoming.append(CONTENT)
    with pytest.raises(RemoteProtocolError, match="declared as 2000 bytes went on past its end"):
        incoming.append(b"!")
    assert files(store) == []


def test_other_bytes_than_the_digest_names_are_refused_and_forgotten(store: BlobStore) -> None:
    """Bytes that do not match their name never get it."""
    incoming = store.receive(REF)
    incoming.append(bytes(REF.length))
    with pytest.raises(RemoteProtocolError, match=f"are not those its digest {REF.hex[:12]} names.*send it anew"):
        incoming.finish()
    assert files(store) == []


def test_a_partial_file_longer_than_the_payload_is_begun_anew(store: BlobStore) -> None:
    """What cannot be a part of the payload is not continued."""
    (store.folder / f"{REF.hex}.part").write_bytes(CONTENT + b"too much")
    incoming = store.receive(REF)
    assert incoming.offset == 0
    incoming.append(CONTENT)
    assert incoming.finish().read_bytes() == CONTENT


def test_a_second_transfer_at_the_same_time_is_refused(store: BlobStore) -> None:
    """Two transfers would mix their bytes; the first goes on unharmed."""
    first = store.receive(REF)
    first.append(CONTENT[:1000])
    with pytest.raises(RemoteProtocolError, match=r"is being received already.*wait until that transfer has ended"):
        BlobStore(store.folder).receive(REF)
    first.append(CONTENT[1000:])
    first.finish()
    assert store.get(REF) == CONTENT


@pytest.mark.parametrize("act", ["append", "finish"])
def test_a_transfer_that_has_ended_takes_nothing_more(store: BlobStore, act: str) -> None:
    """Once paused, a transfer is over: only a new one continues it."""
    incoming = store.receive(REF)
    incoming.pause()
    with pytest.raises(RemoteProtocolError, match=r"has ended.*continue it in a new transfer"):
        incoming.append(CONTENT) if act == "append" else incoming.finish()


def test_bytes_that_changed_under_their_name_are_not_intact(store: BlobStore) -> None:
    """As after a power cut: the name and the length are right, the bytes are not."""
    ref = store.put(b"a payload")
    assert store.intact(ref)
    store.path(ref).write_bytes(bytes(ref.length))
    assert store.has(ref)
    assert not store.intact(ref)
    assert not store.intact(BlobRef.of(b"another"))


def test_pausing_after_the_end_does_nothing(store: BlobStore) -> None:
    """A transfer's owner may always pause it in the end."""
    incoming = store.receive(REF)
    incoming.append(CONTENT)
    incoming.finish()
    incoming.pause()
    assert store.get(REF) == CONTENT


def test_a_transfer_that_has_ended_does_not_forget_what_a_later_one_holds(store: BlobStore) -> None:
    """Only who still receives a payload can throw it away; the one who goes on with it finds all of it."""
    ref = BlobRef.of(b"update")
    older = store.receive(ref)
    older.append(b"upd")
    older.pause()
    newer = store.receive(ref)
    newer.append(b"ate")

    older.discard()

    assert newer.finish().read_bytes() == b"update"


def test_chunks_begin_at_the_offset_and_hold_a_mebibyte(store: BlobStore) -> None:
    """A reader may begin anywhere and gets chunks of `CHUNK` bytes."""
    content = bytes(range(256)) * (CHUNK // 256) + b"tail"
    ref = store.put(content)
    assert [len(chunk) for chunk in store.chunks(ref)] == [CHUNK, 4]
    assert b"".join(store.chunks(ref, 100)) == content[100:]
    assert list(store.chunks(ref, ref.length)) == []


@pytest.mark.parametrize("offset", [-1, 2001])
def test_an_offset_outside_the_payload_is_refused(store: BlobStore, offset: int) -> None:
    """An offset lies in the payload or at its end."""
    ref = store.put(CONTENT)
    with pytest.raises(RemoteProtocolError, match=f"offset {offset} lies outside a payload of 2000 bytes"):
        next(store.chunks(ref, offset))


def test_a_reader_reads_any_stretch_as_often_as_one_likes(store: BlobStore) -> None:
    """It gives what `read` gives, fewer bytes where the payload ends, and goes on when the name is dropped."""
    ref = store.put(CONTENT)
    with store.reader(ref) as read:
        for offset, count in ((0, 10), (1990, 100), (5, 0), (2000, 1), (3, 1000)):
            assert read(offset, count) == store.read(ref, offset, count) == CONTENT[offset : offset + count]
        store.drop(ref)
        assert read(7, 5) == CONTENT[7:12]


def test_a_reader_of_a_missing_payload_is_refused(store: BlobStore) -> None:
    """What is not there cannot be read."""
    with pytest.raises(StorageError, match="is not in"), store.reader(REF):
        pass


def test_a_reader_tells_what_the_disk_refuses(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk names the payload and the folder."""

    def refuse(*_asked: int) -> bytes:
        raise OSError(5, "Input/output error")

    with store.reader(store.put(CONTENT)) as read:
        monkeypatch.setattr(os, "pread", refuse)
        with pytest.raises(StorageError, match=r"cannot read payload .* Input/output error"):
            read(0, 1)


def test_chunks_of_a_missing_payload_are_refused(store: BlobStore) -> None:
    """What is not there cannot be read."""
    with pytest.raises(StorageError, match="is not in"):
        next(store.chunks(REF))


def test_a_payload_is_synced_before_and_its_folder_after_it_gets_its_name(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that survives a power cut has all its bytes: file synced, renamed, folder synced."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def recorded_sync(handle: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        sync(handle)

    def recorded_replace(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    incoming = store.receive(REF)
    incoming.append(CONTENT)
    incoming.finish()
    store.put(b"another")
    assert done == ["sync file", "rename", "sync folder"] * 2


def test_a_file_whose_bytes_are_here_already_is_only_dropped(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The empty memory of a strategy without any costs no sync in each round; another file is synced and taken."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    file = store.folder / "state.part"
    taken = []

    for content in (b"the same", b"the same", b"another"):
        file.write_bytes(content)
        before = len(synced)
        ref = store.take(file)
        taken.append((store.get(ref), len(synced) > before))

    assert taken == [(b"the same", True), (b"the same", False), (b"another", True)]
    assert len(list(store.folder.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """The error names the folder and the way out."""
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write to .*taken.*make the folder writable"):
        BlobStore(tmp_path / "taken")


def test_a_folder_that_is_gone_is_named(store: BlobStore) -> None:
    """Neither a transfer nor a put breaks with an error of the operating system."""
    store.folder.rmdir()
    with pytest.raises(StorageError, match=r"cannot write to .*blobs: No such file"):
        store.receive(REF)
    with pytest.raises(StorageError, match=r"cannot write to .*blobs: No such file"):
        store.put(CONTENT)


class FullDisk:
    """A file on a full disk."""

    closed = False

    def write(self, _: bytes) -> None:
        """Refuses."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Refuses, too: closing writes what waits."""
        self.closed = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_transfer_and_leaves_it_to_be_continued(store: BlobStore) -> None:
    """What the disk took before stays; the error says what to do."""
    incoming = store.receive(REF)
    incoming.append(CONTENT[:500])
    incoming.pause()
    incoming._file = FullDisk()  # type: ignore[assignment] # a disk cannot be filled in a test
    with pytest.raises(StorageError, match=r"No space left.*free disk space"):
        incoming.append(CONTENT[500:])
    assert store.receive(REF).offset == 500


def test_a_put_that_fails_leaves_nothing(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half payload stays behind."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        store.put(CONTENT)
    assert files(store) == []


def test_what_is_not_wanted_is_dropped_with_its_parts(tmp_path: Path) -> None:
    """A wanted payload stays, and so does the part of one that is still coming."""
    store = BlobStore(tmp_path)
    kept, dropped, coming = store.put(b"kept"), store.put(b"dropped"), BlobRef.of(b"coming")
    store.receive(coming).pause()
    store.receive(BlobRef.of(b"unwanted")).pause()
    store.drop_others(iter([kept, coming]))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([kept.hex, f"{coming.hex}.part"])
    assert not store.has(dropped)


def test_a_transfer_that_another_of_the_same_bytes_overtook_has_ended_well(tmp_path: Path) -> None:
    """The other continued its file and gave it the payload's name."""
    store = BlobStore(tmp_path)
    ref = BlobRef.of(b"payload")
    incoming = store.receive(ref)
    incoming.append(b"payload")
    (tmp_path / f"{ref.hex}.part").rename(store.path(ref))
    assert incoming.finish() == store.path(ref)
    assert store.get(ref) == b"payload"
