"""Stored monitors: a cache of a run's monitor at some version of the run; it may lag or be missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import monitor_states


class StoredMonitorState(NamedTuple):
    """The opaque state of a monitor, and the run's version that it belongs to."""

    version: int
    state: str


def load_states(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, StoredMonitorState]:
    """The stored monitors of these runs."""
    query = sa.select(monitor_states.c.run_id, monitor_states.c.version, monitor_states.c.state)
    rows = tx.execute(query.where(monitor_states.c.run_id.in_(run_ids)))
    return {run_id: StoredMonitorState(version, state) for run_id, version, state in rows}


def save_state(tx: Transaction, run_id: UUID, stored: StoredMonitorState) -> None:
    """Store the monitor of a run, which is locked, replacing the previous one."""
    insert = (postgresql if tx.dialect.name == "postgresql" else sqlite).insert(monitor_states)
    row = {"run_id": run_id, "version": stored.version, "state": stored.state}
    updated = {name: insert.excluded[name] for name in ("version", "state")}
    tx.execute(insert.values(row).on_conflict_do_update(index_elements=["run_id"], set_=updated))
