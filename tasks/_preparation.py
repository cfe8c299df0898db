"""How a table's numbers become model inputs: shift, scale and fill of each numeric column, as canonical JSON."""

from __future__ import annotations

import json
from typing import Literal

import pydantic
from pydantic import Field

from federation.errors import RemoteProtocolError
from federation.job import Frozen

__all__ = ["NumericPreparation", "Preparation"]

_FIX = "take the preparation of this job's statistics step"


class NumericPreparation(Frozen):
    """An input is (value - `shift`) / `scale`; a missing value becomes `fill` first."""

    name: str
    shift: float
    scale: float = Field(gt=0)
    fill: float


class Preparation(Frozen):
    """The numeric columns of a contract, in its order."""

    format: Literal[1] = 1
    columns: tuple[NumericPreparation, ...]

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no blanks; equal preparations are equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Preparation:
        """The preparation that `content` holds.

        Raises:
            RemoteProtocolError: It is not one: not JSON, another format, unknown keys, or numbers that are not finite.
        """
        try:
            return cls.model_validate_json(content)
        except pydantic.ValidationError as broken:
            where = ".".join(str(step) for step in broken.errors()[0]["loc"]) or "its text"
            raise RemoteProtocolError(f"a preparation cannot be read at {where[:80]}", fix=_FIX) from broken
