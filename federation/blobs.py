"""Content-addressed payloads on disk: named by their SHA-256, received in chunks, resumable, never half there."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from federation.errors import RemoteProtocolError, StorageError

__all__ = ["CHUNK", "BlobRef", "BlobStore", "Incoming"]

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
        if self.length < 0:
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

    A partial file of an interrupted transfer is continued from its end (`offset`).
    """

    def __init__(self, store: "BlobStore", ref: BlobRef) -> None:
        self.ref = ref
        self._store = store
        self._partial = store.folder / f"{ref.hex}.part"
        self._hash = hashlib.sha256()
        self.offset = 0
        if self._partial.exists():
            with self._partial.open("rb") as file:
                while chunk := file.read(CHUNK):
                    self._hash.update(chunk)
                    self.offset += len(chunk)
            if self.offset > ref.length:
                self._partial.unlink()
                self._hash = hashlib.sha256()
                self.offset = 0
        self._file = self._partial.open("ab")

    def append(self, chunk: bytes | memoryview) -> None:
        """Adds the next bytes.

        Raises:
            RemoteProtocolError: More bytes came than were declared; the partial file is gone.
            StorageError: The disk does not take them.
        """
        if self.offset + len(chunk) > self.ref.length:
            self.discard()
            raise RemoteProtocolError(
                f"a payload declared as {self.ref.length} bytes went on past its end",
                fix="send exactly the declared bytes",
            )
        try:
            self._file.write(chunk)
        except OSError as full:
            raise StorageError(f"cannot write to {self._store.folder}: {full.strerror}", fix="free disk space") from full
        self._hash.update(chunk)
        self.offset += len(chunk)

    def finish(self) -> Path:
        """Makes the payload durable under its name and returns its path.

        Raises:
            RemoteProtocolError: Bytes are missing (the partial file stays, to be continued) or the digest differs (it
                is gone).
        """
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
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._store.adopt(self._partial, self.ref)

    def pause(self) -> None:
        """Closes the partial file so that a later transfer continues it."""
        self._file.close()

    def discard(self) -> None:
        """Forgets all that came."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


class BlobStore:
    """A folder of payloads, each under its digest. A name is there only when all its bytes are, durably.

    Args:
        folder: Where the payloads lie; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise StorageError(f"cannot make the folder {folder}: {refused.strerror}", fix="make it writable") from refused

    def path(self, ref: BlobRef) -> Path:
        """Where `ref` lies, or would lie."""
        return self.folder / ref.hex

    def has(self, ref: BlobRef) -> bool:
        """Whether all of `ref` is here."""
        path = self.path(ref)
        return path.exists() and path.stat().st_size == ref.length

    def put(self, content: bytes | memoryview) -> BlobRef:
        """Stores `content` durably and returns its name."""
        ref = BlobRef.of(content)
        if not self.has(ref):
            incoming = Incoming(self, ref)
            incoming.discard()
            incoming = Incoming(self, ref)
            incoming.append(content)
            incoming.finish()
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """The whole payload; for small ones (job files, preparations), never for models on the round's path.

        Raises:
            StorageError: It is not here.
        """
        if not self.has(ref):
            raise StorageError(f"payload {ref.hex[:12]} is not in {self.folder}", fix="restore it from a backup")
        return self.path(ref).read_bytes()

    def chunks(self, ref: BlobRef, offset: int = 0) -> Iterator[bytes]:
        """The payload from `offset` on, a chunk at a time.

        Raises:
            RemoteProtocolError: The offset lies outside.
            StorageError: It is not here.
        """
        if not self.has(ref):
            raise StorageError(f"payload {ref.hex[:12]} is not in {self.folder}", fix="restore it from a backup")
        if not 0 <= offset <= ref.length:
            raise RemoteProtocolError(f"offset {offset} lies outside a payload of {ref.length} bytes")
        with self.path(ref).open("rb") as file:
            file.seek(offset)
            while chunk := file.read(CHUNK):
                yield chunk

    def receive(self, ref: BlobRef) -> Incoming:
        """Starts or continues the transfer of `ref`."""
        return Incoming(self, ref)

    def adopt(self, file: Path, ref: BlobRef) -> Path:
        """Moves a complete, synced file in under its name; durable afterwards."""
        target = self.path(ref)
        file.replace(target)
        _sync_folder(self.folder)
        return target

    def drop(self, ref: BlobRef) -> None:
        """Forgets `ref`, if it is here."""
        self.path(ref).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # Windows has no directory handles to sync; NTFS journals the rename
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
