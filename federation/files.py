"""Small files, each written whole or not at all, and durably, before the next is begun."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from federation import codec
from federation.blobs import sync_folder
from federation.errors import RemoteProtocolError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["decode", "draft_of", "read", "read_json", "rename", "write", "write_json"]

T = TypeVar("T")

_ADAPTERS = dict[object, TypeAdapter[Any]]()


def write(path: Path, content: bytes, *, secret: bool = False, durable: bool = True) -> None:
    """Makes `content` the file's whole content, durably; a crash leaves the old content or the new, nothing between.

    Its folder is made if need be and is this user's alone; so is the file if it is `secret`. What is not `durable`
    survives the end of this process, but a power cut may leave anything in its place.

    Raises:
        StorageError: The disk does not take it.
    """
    draft = draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.chmod(0o700)
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError as refused:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path}: {refused.strerror}", fix="give this user the right to write"
        ) from refused


def draft_of(path: Path) -> Path:
    """Where a file is written before it takes its name; a kill may leave it there."""
    return path.with_name(f"{path.name}.new")


def rename(draft: Path, final: Path) -> None:
    """Gives a file or folder its name, durably.

    Raises:
        StorageError: The disk does not take it.
    """
    try:
        draft.rename(final)
        sync_folder(final.parent)
    except OSError as refused:
        problem = f"cannot write {final}: {refused.strerror}"
        raise StorageError(problem, fix="give this user the right to write there") from refused


def read(path: Path, made_by: str) -> bytes:
    """The file's content; `made_by` says which command makes the file.

    Raises:
        StorageError: It is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as missing:
        raise StorageError(f"there is no {path}", fix=made_by) from missing
    except OSError as refused:
        raise StorageError(
            f"cannot read {path}: {refused.strerror}", fix="give this user the right to read"
        ) from refused


def decode(cls: type[T], path: Path, made_by: str) -> T:
    """The message in the file.

    Raises:
        StorageError: It is missing, cannot be read, or holds something else.
    """
    try:
        return codec.decode(cls, read(path, made_by))
    except RemoteProtocolError as broken:
        raise _damaged(path) from broken


def write_json(path: Path, value: object, *, durable: bool = True) -> None:
    """Makes a dataclass's fields the file's content, as `write` does."""
    write(path, _fields(type(value)).dump_json(value, indent=2) + b"\n", durable=durable)


def read_json(cls: type[T], path: Path, made_by: str) -> T:
    """The dataclass in the file.

    Raises:
        StorageError: It is missing, cannot be read, or holds something else.
    """
    try:
        return _fields(cls).validate_json(read(path, made_by))
    except ValidationError as broken:
        raise _damaged(path) from broken


def _fields(cls: type[T]) -> TypeAdapter[T]:
    """Made once for each dataclass: making it takes longer than writing the file."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def _damaged(path: Path) -> StorageError:
    return StorageError(f"{path} is damaged", fix="restore it from a backup")
