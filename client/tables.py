"""Which version of a table it is, and the administrator's word that exact sums may go on over a new one (section 8.5).

Sums over two versions of a table can be subtracted, and their difference is the change: a new version is taken between
jobs only, and only when enough rows are other.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.site_events import Clock, Persist, ReTable

if TYPE_CHECKING:
    import pandas as pd

    from client.summing import Sealing
    from privacy.secure_aggregation.rostersum.floor import Floor

__all__ = ["ACCEPTED", "accept", "version"]

ACCEPTED = "table"
"""The kind of the audit log's entry that a new version was accepted: family, digest and rows, in words."""


def version(table: pd.DataFrame) -> bytes:
    """SHA-256 of the columns' names and of the rows in their order, each by pandas' 64-bit hash of its values.

    Nobody but this site, whose table it is, could look for another table of the same digest.
    """
    import pandas as pd

    rows = pd.util.hash_pandas_object(table, index=False).to_numpy(dtype="<u8")
    found = hashlib.sha256(repr([str(name) for name in table.columns]).encode())
    found.update(np.ascontiguousarray(rows).data)
    return found.digest()


def accept(sealing: Sealing, floor: Floor, change: ReTable, clock: Clock) -> None:
    """Lets a family's exact sums read this version of its table from now on, durably, and notes it in the audit log.

    Raises:
        PolicyRefused: A job on the family is open, or too few rows are other; nothing changed.
        StorageError: The disk does not take it.
    """
    site = Site(sealing.key, floor, sealing.vault.durable)
    effects = site.receive(change, clock)
    told = f"{change.family} {change.table.hex()} {change.rows_changed}"
    sealing.audit.append(ACCEPTED, told.encode(), clock.wall)
    for effect in effects:
        if isinstance(effect, Persist):
            sealing.vault.persist(effect)
