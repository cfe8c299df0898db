"""Content-addressed payloads on disk: named by their SHA-256, received in chunks, resumable, never half there."""

import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from federation.errors import RemoteProtocolError, StorageError

__all__ = ["CHUNK", "BlobRef", "BlobStore", "Draft", "Incoming", "Reader", "sync_folder"]

CHUNK = 1024 * 1024
"""Bytes per chunk on the wire and per read on disk (measured: 1-4 MiB cost the least CPU through TLS)."""

_DIGEST = 32


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Name and length of a payload: SHA-256 (32 bytes) and bytes."""

    digest: bytes
    length: int

    def __post_init__(self) -> None:
        """Refuses what cannot name a payload."""
        if len(self.digest) != _DIGEST:
            raise RemoteProtocolError(f"a payload's digest must have 32 bytes, not {len(self.digest)}")
        if type(self.length) is not int or not 0 <= self.length < 2**63:
            raise RemoteProtocolError(f"a payload cannot have {self.length} bytes")

    @property
    def hex(self) -> str:
        """The digest as people read it."""
        return self.digest.hex()

    @classmethod
    def of(cls, content: bytes | memoryview) -> "BlobRef":
        """The name of `content`."""
        return cls(hashlib.sha256(content).digest(), len(content))


class Incoming:
    """One payload on its way in: appends chunks to a partial file and becomes a blob only when length and digest agree.

    A partial file of an interrupted transfer is continued from its end (`offset`). At most one transfer at a time
    writes to it: two would mix their bytes under a name that promises others.
    """

    def __init__(self, store: "BlobStore", ref: BlobRef) -> None:
        self.ref = ref
        self._store = store
        self._partial = store.folder / f"{ref.hex}.part"
        self._hash = hashlib.sha256()
        self.offset = 0
        with _disk(store.folder):
            self._file = self._partial.open("a+b")
            try:
                _lock(self._file, ref)
                self._reread()
            except BaseException:
                self._file.close()
                raise

    def _reread(self) -> None:
        """Takes up what an interrupted transfer left; more than the payload has is no part of it."""
        if os.fstat(self._file.fileno()).st_size > self.ref.length:
            self._file.truncate(0)
        self._file.seek(0)
        while chunk := self._file.read(CHUNK):
            self._hash.update(chunk)
            self.offset += len(chunk)

    def append(self, chunk: bytes | memoryview) -> None:
        """Adds the next bytes.

        Raises:
            RemoteProtocolError: More bytes came than were declared (the partial file is gone), or the transfer has
                ended.
            StorageError: The disk does not take them; what it took stays, to be continued.
        """
        self._check_open()
        if self.offset + len(chunk) > self.ref.length:
            self.discard()
            raise RemoteProtocolError(
                f"a payload declared as {self.ref.length} bytes went on past its end",
                fix="send exactly the declared bytes",
            )
        try:
            with _disk(self._store.folder):
                self._file.write(chunk)
        except StorageError:
            self.pause()
            raise
        self._hash.update(chunk)
        self.offset += len(chunk)

    def finish(self) -> Path:
        """Makes the payload durable under its name and returns its path.

        Raises:
            RemoteProtocolError: Bytes are missing (the partial file stays, to be continued), the digest differs (it is
                gone), or the transfer has ended.
            StorageError: The disk does not take them.
        """
        self._check_open()
        if self.offset != self.ref.length:
            self.pause()
            raise RemoteProtocolError(
                f"a payload of {self.ref.length} bytes stopped at {self.offset}", fix="continue from that offset"
            )
        if self._hash.digest() != self.ref.digest:
            self.discard()
            raise RemoteProtocolError(
                f"a payload's bytes are not those its digest {self.ref.hex[:12]} names", fix="send it anew"
            )
        try:
            with _disk(self._store.folder):
                self._store.sync(self._file)
        finally:
            self.pause()
        try:
            return self._store.adopt(self._partial, self.ref)
        except StorageError:
            if self._store.has(self.ref):  # another transfer of these bytes continued this one and came first
                return self._store.path(self.ref)
            raise

    def pause(self) -> None:
        """Closes the partial file so that a later transfer continues it; nothing happens if this one has ended."""
        with suppress(OSError):  # bytes that the disk does not take now are sent again, after a reread
            self._file.close()

    def discard(self) -> None:
        """Forgets all that came; nothing happens if this transfer has ended, for a later one may continue it."""
        if not self._file.closed:
            self.pause()
            self._partial.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if self._file.closed:
            raise RemoteProtocolError(
                f"the transfer of payload {self.ref.hex[:12]} has ended", fix="continue it in a new transfer"
            )


class Draft:
    """A payload that is written here, a piece at a time; its name is known when it is kept."""

    def __init__(self, store: "BlobStore", file: BinaryIO, path: Path) -> None:
        self._store = store
        self._file = file
        self._path = path
        self._hash = hashlib.sha256()
        self._length = 0

    def write(self, content: bytes | memoryview) -> None:
        """Adds the next bytes.

        Raises:
            StorageError: The disk does not take them.
        """
        with _disk(self._store.folder):
            self._file.write(content)
        self._hash.update(content)
        self._length += len(content)

    def settle(self) -> None:
        """Brings to the disk what was written so far, so that `keep` has less to wait for; any thread may, meanwhile.

        Raises:
            StorageError: The disk does not take it: the draft is lost, for `keep` would not be told again.
        """
        if self._store.durable:
            with _disk(self._store.folder):
                os.fsync(self._file.fileno())

    def keep(self) -> BlobRef:
        """Gives the payload its name, durably.

        Raises:
            StorageError: The disk does not take it.
        """
        ref = BlobRef(self._hash.digest(), self._length)
        with _disk(self._store.folder):
            self._store.sync(self._file)
        self._store.adopt(self._path, ref)
        return ref


class Reader:
    """Reads of one payload, as often as one likes and in any thread, until the block it is used in ends."""

    __slots__ = ("_file", "_ref", "_store")

    def __init__(self, store: "BlobStore", ref: BlobRef) -> None:
        self._store, self._ref = store, ref
        with store.reading(ref):
            self._file = os.open(store.path(ref), os.O_RDONLY)  # a number: of file objects there would be one a site

    def __call__(self, offset: int, count: int) -> bytes:
        """So many bytes from `offset` on, or fewer where the payload ends.

        Raises:
            StorageError: They cannot be read.
        """
        with self._store.reading(self._ref):
            return os.pread(self._file, count, offset)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *failed: object) -> None:
        """Closes the file."""
        os.close(self._file)


class BlobStore:
    """A folder of payloads, each under its digest. A name is there only when all its bytes are.

    Args:
        folder: Where the payloads lie; made if missing.
        durable: Whether a name outlives a power cut. Payloads that are sent again when they are lost need not.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = folder
        self.durable = durable
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, ref: BlobRef) -> Path:
        """Where `ref` lies, or would lie."""
        return self.folder / ref.hex

    def has(self, ref: BlobRef) -> bool:
        """Whether all of `ref` is here."""
        path = self.path(ref)
        return path.exists() and path.stat().st_size == ref.length

    def intact(self, ref: BlobRef) -> bool:
        """Whether all of `ref` is here and is what it was: a power cut may damage a payload that is not durable."""
        if not self.has(ref):
            return False
        with _disk(self.folder), self.path(ref).open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest() == ref.digest

    def put(self, content: bytes | memoryview) -> BlobRef:
        """Stores `content` and returns its name."""
        ref = BlobRef.of(content)
        if not self.has(ref):
            with self.draft() as draft:
                draft.write(content)
                draft.keep()
        return ref

    @contextmanager
    def draft(self) -> Iterator[Draft]:
        """A payload to be written piece by piece; what is not kept by the end of the block is gone.

        Raises:
            StorageError: The folder cannot be written to.
        """
        with _disk(self.folder):
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with open(handle, "wb") as file:  # noqa: PTH123 - a handle, not a path
                yield Draft(self, file, Path(name))
        finally:
            Path(name).unlink(missing_ok=True)

    def get(self, ref: BlobRef) -> bytes:
        """The whole payload; for small ones (job files, preparations), never for models on the round's path.

        Raises:
            StorageError: It is not here.
        """
        if not self.has(ref):
            raise self._missing(ref)
        return self.path(ref).read_bytes()

    def mapped(self, ref: BlobRef) -> memoryview:
        """The payload as read-only memory that the system pages in and out; the last view of it unmaps it.

        Raises:
            StorageError: It is not here.
        """
        if not self.has(ref):
            raise self._missing(ref)
        if not ref.length:
            return memoryview(b"")
        with self.path(ref).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def reader(self, ref: BlobRef) -> "Reader":
        """Reads the payload as `read` does, but opens its file once.

        Raises:
            StorageError: It is not here, or cannot be read.
        """
        return Reader(self, ref)

    def read(self, ref: BlobRef, offset: int, count: int) -> bytes:
        """So many bytes of the payload from `offset` on, or fewer where it ends.

        Raises:
            StorageError: It is not here, or cannot be read.
        """
        with self.reading(ref), self.path(ref).open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(count)

    @contextmanager
    def reading(self, ref: BlobRef) -> Iterator[None]:
        """Says which payload cannot be read, and why."""
        try:
            yield
        except FileNotFoundError as missing:
            raise self._missing(ref) from missing
        except OSError as refused:
            problem = f"cannot read payload {ref.hex[:12]} in {self.folder}: {refused.strerror}"
            raise StorageError(problem, fix="make the folder readable") from refused

    def take(self, file: Path) -> BlobRef:
        """Moves a complete file of ours in under its name, durably; one that is here already is only dropped."""
        with _disk(self.folder), file.open("rb+") as content:
            ref = BlobRef(hashlib.file_digest(content, "sha256").digest(), file.stat().st_size)
            held = self.has(ref)
            if not held:
                self.sync(content)
        if held:
            file.unlink()
        else:
            self.adopt(file, ref)
        return ref

    def drop_others(self, wanted: Iterable[BlobRef]) -> None:
        """Drops every payload, and every part of one, that is none of `wanted`.

        Raises:
            StorageError: A file cannot be removed.
        """
        names = {ref.hex for ref in wanted}
        with _disk(self.folder):
            for path in self.folder.iterdir():
                if path.name.removesuffix(".part") not in names:
                    path.unlink(missing_ok=True)

    def chunks(self, ref: BlobRef, offset: int = 0) -> Iterator[bytes]:
        """The payload from `offset` on, a chunk at a time.

        Raises:
            RemoteProtocolError: The offset lies outside.
            StorageError: It is not here.
        """
        if not self.has(ref):
            raise self._missing(ref)
        if not 0 <= offset <= ref.length:
            raise RemoteProtocolError(f"offset {offset} lies outside a payload of {ref.length} bytes")
        with self.path(ref).open("rb") as file:
            file.seek(offset)
            while chunk := file.read(CHUNK):
                yield chunk

    def receive(self, ref: BlobRef) -> Incoming:
        """Starts or continues the transfer of `ref`.

        Raises:
            RemoteProtocolError: Another transfer of it is under way.
            StorageError: The folder cannot be written to.
        """
        return Incoming(self, ref)

    def adopt(self, file: Path, ref: BlobRef) -> Path:
        """Moves a complete, synced file in under its name."""
        target = self.path(ref)
        with _disk(self.folder):
            file.replace(target)
            if self.durable:
                sync_folder(self.folder)
        return target

    def sync(self, file: BinaryIO) -> None:
        """Brings what was written to `file` to the disk, if this folder is to outlive a power cut."""
        file.flush()
        if self.durable:
            os.fsync(file.fileno())

    def _missing(self, ref: BlobRef) -> StorageError:
        return StorageError(f"payload {ref.hex[:12]} is not in {self.folder}", fix="restore it from a backup")

    def drop(self, ref: BlobRef) -> None:
        """Forgets `ref`, if it is here."""
        self.path(ref).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable, where the system lets folders be opened."""
    if os.name == "nt":
        return  # Windows has no directory handles to sync; NTFS journals the rename
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Says which folder the disk did not let us use, and why."""
    try:
        yield
    except OSError as refused:
        raise StorageError(
            f"cannot write to {folder}: {refused.strerror}", fix="free disk space, or make the folder writable"
        ) from refused


def _lock(file: BinaryIO, ref: BlobRef) -> None:
    if os.name == "nt":
        return  # Windows runs sites only, and a site has one connection
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as taken:
        raise RemoteProtocolError(
            f"payload {ref.hex[:12]} is being received already", fix="wait until that transfer has ended"
        ) from taken
