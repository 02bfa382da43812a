"""Kept monitors: a cache of where a run's monitor stood at some version of the run; it may lag or be missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction, driver_connection
from evalstop_service.store.tables import moment_text, monitor_states


class StoredMonitorState(NamedTuple):
    """The opaque state of a monitor, and the version of its run that it belongs to."""

    version: int
    state: str


def load_states(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, StoredMonitorState]:
    """Those of these runs' monitors that are kept."""
    rows: Iterable[Sequence[Any]]
    if tx.dialect.name == "postgresql":
        rows = driver_connection(tx).cursor(binary=True).execute(_FIND, (list(run_ids),), prepare=True)
    else:
        query = sa.select(monitor_states.c.run_id, monitor_states.c.version, monitor_states.c.state)
        rows = tx.execute(query.where(monitor_states.c.run_id.in_(run_ids)))
    return {run_id: StoredMonitorState(version, state) for run_id, version, state in rows}


def save_states(tx: Transaction, kept: Sequence[tuple[UUID, int, str]], now: datetime) -> None:
    """Keep monitors of runs that are locked, each in place of the one before: (run, version, state)."""
    if not kept:
        return
    if tx.dialect.name == "postgresql":
        run_ids, versions, states = (list(column) for column in zip(*kept, strict=True))
        driver_connection(tx).execute(_KEEP_ALL, (now, run_ids, versions, states), prepare=True)
    else:
        at = moment_text(now)
        tx.exec_driver_sql(_KEEP, [(run_id.hex, version, state, at) for run_id, version, state in kept])


_FIND = "SELECT run_id, version, state FROM monitor_states WHERE run_id = ANY(%b)"

_INSTEAD = """ON CONFLICT (run_id) DO UPDATE
SET version = excluded.version, state = excluded.state, saved_at = excluded.saved_at"""

_KEEP = f"INSERT INTO monitor_states (run_id, version, state, saved_at) VALUES (?, ?, ?, ?) {_INSTEAD}"  # noqa: S608

_KEEP_ALL = f"""
INSERT INTO monitor_states (run_id, version, state, saved_at) SELECT run_id, version, state, %b::timestamptz
FROM unnest(%b::uuid[], %b::integer[], %b::text[]) AS new (run_id, version, state) {_INSTEAD}
"""  # noqa: S608
