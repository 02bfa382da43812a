"""Kept monitors: a cache of where a run's monitor stood at some version of the run; it may lag or be missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import monitors


class KeptMonitor(NamedTuple):
    """The opaque state of a monitor, and the version of its run that it belongs to."""

    version: int
    state: str


def find_many(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, KeptMonitor]:
    """Those of these runs' monitors that are kept."""
    query = sa.select(monitors.c.run_id, monitors.c.version, monitors.c.state)
    return {
        run_id: KeptMonitor(version, state)
        for run_id, version, state in tx.execute(query.where(monitors.c.run_id.in_(run_ids)))
    }


def keep(tx: Transaction, kept: Iterable[tuple[UUID, int, str]], now: datetime) -> None:
    """Keep monitors of runs that are locked, each in place of the one before: (run, version, state)."""
    rows = [{"run_id": run_id, "version": version, "state": state, "kept_at": now} for run_id, version, state in kept]
    if not rows:
        return
    insert = (postgresql.insert if tx.dialect.name == "postgresql" else sqlite.insert)(monitors)
    new = insert.excluded
    tx.execute(
        insert.on_conflict_do_update(
            index_elements=["run_id"], set_={"version": new.version, "state": new.state, "kept_at": new.kept_at}
        ),
        rows,
    )


def forget(tx: Transaction, run_ids: Sequence[UUID]) -> None:
    """Drop what is kept of these runs."""
    tx.execute(sa.delete(monitors).where(monitors.c.run_id.in_(run_ids)))
