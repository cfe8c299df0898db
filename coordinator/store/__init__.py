"""The coordinator's durable memory: SQLModel tables, Alembic migrations, one transaction per step."""

from coordinator.store.database import url_in
from coordinator.store.reader import StoreReader
from coordinator.store.store import Store

__all__ = ["Store", "StoreReader", "url_in"]
