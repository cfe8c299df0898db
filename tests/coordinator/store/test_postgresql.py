"""The store in PostgreSQL is the store in SQLite. Set PARLEY_TEST_POSTGRESQL to the URL of an empty database."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlmodel import SQLModel

from coordinator.records import JobRecord, ModelRecord, SitePresence, StepRecord
from coordinator.store import Store, StoreReader, database
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError
from federation.messages import JobState

URL = os.environ.get("PARLEY_TEST_POSTGRESQL", "")

pytestmark = pytest.mark.skipif(not URL, reason="PARLEY_TEST_POSTGRESQL names no database")


def test_a_job_runs_to_its_model(job: Callable[[], JobRecord], step: Callable[[int], StepRecord]) -> None:
    """Migration, a job's life, a refused step and a reader's view, as in SQLite."""
    final = ModelRecord("heart-1", "heart", BlobRef.of(b"final"), 1, 9.0, (), "{}")
    here = SitePresence("cleveland", connected=True, last_seen=6.0, state="training")
    last = replace(step(2), state=JobState.FINISHED, final=final)
    with Store(URL) as store:
        store.add_job(job())
        store.set_presence((here,))
        store.commit_step(step(1))
        with pytest.raises(LocalProtocolError, match="its next step is 2"):
            store.commit_step(step(1))
        store.commit_step(last)
        with store._engine.connect() as connection:
            options = {"version_table": database.VERSION_TABLE, "compare_type": True}
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, SQLModel.metadata) == []
    with StoreReader(URL) as reader:
        assert reader.steps("heart-1") == (step(1), last)
        assert reader.model(final.payload.hex[:8]) == final
        assert reader.presence() == (here,)
