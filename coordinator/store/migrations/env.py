"""How Alembic reaches the database: over the connection that the store hands in, within its transaction."""

from typing import Literal

import sqlalchemy as sa
from alembic import context
from sqlmodel import SQLModel

from coordinator.store import tables as _tables  # noqa: F401 - fills the metadata
from coordinator.store.database import VERSION_TABLE


def _plain(kind: str, item: object, _context: object) -> str | Literal[False]:
    """A column's type in SQLAlchemy's own words: a migration must not change when the tables' types do."""
    match item:
        case sa.types.TypeDecorator() if kind == "type":
            return f"sa.{item.impl!r}"
        case sa.Enum() if kind == "type":
            return f"sa.String(length={item.length})"
        case _:
            return False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    version_table=VERSION_TABLE,
    compare_type=True,
    render_as_batch=True,  # SQLite alters a table only by copying it
    render_item=_plain,
)
with context.begin_transaction():
    context.run_migrations()
