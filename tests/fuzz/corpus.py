"""Inputs that the repository keeps: for each kind of input, one for each thing that ever came of such an input."""

import re
from functools import cache

from tests.fuzz.profiles import CORPUS, fuzzing

__all__ = ["keep", "seeds"]

_LONGEST_NAME = 100
_VALUES = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[0-9]+""")
"""What differs between outcomes of one kind: quoted words and numbers."""
_LARGEST = 4096
"""Bytes of an input that is kept; a longer one is found again."""


@cache
def seeds(kind: str) -> tuple[bytes, ...]:
    """The inputs of a kind that were kept before this run, by name: what it keeps itself, the next one begins with."""
    return tuple(path.read_bytes() for path in sorted((CORPUS / kind).glob("*")))


def keep(kind: str, outcome: str, content: bytes) -> None:
    """Under `make fuzz`, keeps an input if nothing that is kept led to the same outcome, whatever values it names."""
    if not fuzzing() or len(content) > _LARGEST:
        return
    name = re.sub(r"[^a-z]+", "-", _VALUES.sub("", outcome).lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
    path = CORPUS / kind / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
