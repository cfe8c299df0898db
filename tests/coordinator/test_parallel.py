import os
import threading
from pathlib import Path

import pytest

from coordinator import parallel
from coordinator.parallel import Settling, in_parts
from federation.blobs import BlobRef, BlobStore, Draft
from federation.errors import StorageError


def _start(part: slice) -> int:
    start: int = part.start
    return start


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads there are."""
    count: int = request.param
    monkeypatch.setattr(parallel, "_THREADS", count)
    return count


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [0, 1, 4, 5, 1003])
def test_parts_cover_the_vector_once_and_come_in_order(size: int) -> None:
    """However many threads work on them."""
    parts = list(in_parts(size, 4, lambda part: part))
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(size))
    assert all(part.stop - part.start == 4 for part in parts[:-1])


def test_no_more_parts_are_begun_than_there_are_threads_and_one(threads: int) -> None:
    """Memory does not grow with the vector: what nobody has taken yet is bounded."""
    begun: list[int] = []
    for taken, _ in enumerate(in_parts(400, 4, lambda part: begun.append(part.start)), start=1):
        assert len(begun) <= taken + threads


def test_two_threads_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the first two parts ends before the other has begun."""
    monkeypatch.setattr(parallel, "_THREADS", 2)
    both = threading.Barrier(2, timeout=60)

    def meet(part: slice) -> slice:
        both.wait()
        return part

    assert list(in_parts(2, 1, meet)) == [slice(0, 1), slice(1, 2)]


@pytest.mark.usefixtures("threads")
def test_a_part_that_fails_ends_the_work() -> None:
    """Its error is raised where the parts are taken, and the parts far behind it are never begun."""
    begun: list[int] = []

    def work(part: slice) -> int:
        begun.append(part.start)
        if part.start == 8:
            raise StorageError("no more", fix="none")
        return _start(part)

    parts = in_parts(4000, 4, work)
    assert [next(parts), next(parts)] == [0, 4]
    with pytest.raises(StorageError, match="no more"):
        next(parts)
    assert len(begun) < 12


@pytest.mark.usefixtures("threads")
def test_whoever_takes_no_more_parts_leaves_no_thread_behind() -> None:
    """Closing the iterator ends its threads."""
    before = threading.active_count()
    parts = in_parts(4000, 4, _start)
    assert next(parts) == 0
    parts.close()
    assert threading.active_count() == before


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that synced, and when the draft got its name."""
    seen: list[str] = []
    sync, adopt = os.fsync, BlobStore.adopt

    def spied(handle: int) -> None:
        seen.append(threading.current_thread().name)
        sync(handle)

    def adopted(self: BlobStore, file: Path, ref: BlobRef) -> Path:
        seen.append("named")
        return adopt(self, file, ref)

    monkeypatch.setattr(os, "fsync", spied)
    monkeypatch.setattr(BlobStore, "adopt", adopted)
    monkeypatch.setattr(parallel, "_UNSETTLED", 1000)
    return seen


def written(store: BlobStore, pieces: int = 50) -> BlobRef:
    """A payload of many pieces."""
    with store.draft() as draft, Settling(draft) as settling:
        for piece in range(pieces):
            settling.write(bytes([piece]) * 500)
        return settling.keep()


def test_the_disk_is_given_a_draft_while_it_is_written(tmp_path: Path, settled: list[str]) -> None:
    """A thread syncs beside the writing; the rest is synced before the payload gets its name, and nothing is lost."""
    store = BlobStore(tmp_path)
    ref = written(store)
    assert store.get(ref) == b"".join(bytes([piece]) * 500 for piece in range(50))
    named = settled.index("named")
    assert any(each.startswith("settling") for each in settled[:named])
    assert settled[named - 1] == threading.current_thread().name


def test_what_need_not_outlive_a_power_cut_is_not_synced(tmp_path: Path, settled: list[str]) -> None:
    """A folder whose payloads are sent again when they are lost."""
    written(BlobStore(tmp_path, durable=False))
    assert settled == ["named"]


@pytest.mark.parametrize("pieces", [4, 50])
def test_a_disk_that_refuses_once_loses_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: list[str], pieces: int
) -> None:
    """The system tells of a failed write once: though a later sync succeeds, nothing gets the name."""
    refusals = iter([OSError(28, "No space left on device")])
    sync = os.fsync

    def refused(handle: int) -> None:
        for error in refusals:
            raise error
        sync(handle)

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(StorageError, match="No space left on device"):
        written(BlobStore(tmp_path), pieces)
    assert "named" not in settled
    assert not list(tmp_path.iterdir())


def test_a_draft_settles_what_was_written(tmp_path: Path) -> None:
    """`settle` may come at any time, and the rest is still written."""
    store = BlobStore(tmp_path)
    with store.draft() as draft:
        assert isinstance(draft, Draft)
        draft.settle()
        draft.write(b"one")
        draft.settle()
        draft.write(b"two")
        assert store.get(draft.keep()) == b"onetwo"
