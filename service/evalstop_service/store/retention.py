"""Removes the details of runs that ended long ago: runs are marked first, then emptied a few thousand rows at a time.

Marking skips locked runs, and from then on ingestion refuses the run; deleting touches rows that nothing else uses.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store import tables
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import decisions, deliveries, endpoints, run_deletions, runs

REMOVED = (
    tables.delivery_attempts,
    tables.deliveries,
    tables.events,
    tables.verdicts,
    tables.checkpoints,
    tables.eval_requests,
    tables.monitor_states,
    tables.observations,
    tables.run_health,
)
"""The tables with the details of a run, ordered so that no row outlives the row that it refers to.

The run stays, with its last verdict and best checkpoint, and so does everything that shows how often decisions were
right.
"""

_RUNS_AT_A_TIME = 50


def mark_runs(tx: Transaction, project_id: UUID, ended_before: datetime, now: datetime, limit: int) -> int:
    """Mark up to `limit` runs of a project that ended before a moment as pruned, longest ended first; returns their
    number.

    A run is left out while it is locked, while a delivery waits for an active endpoint, and while a stop waits for its
    confirmation.
    """
    query = sa.select(runs.c.id).where(runs.c.project_id == project_id, _is_old(ended_before))
    query = query.order_by(runs.c.ended_at, runs.c.id).limit(limit).with_for_update(skip_locked=True, of=runs)
    marked_ids = list(tx.execute(query).scalars())
    if marked_ids:
        # A new version, so that run caches reload the run.
        values = {"pruned_at": now, "version": runs.c.version + 1}
        tx.execute(runs.update().where(runs.c.id.in_(marked_ids)).values(values))
        tx.execute(run_deletions.insert(), [{"run_id": run_id, "started_at": now} for run_id in marked_ids])
    return len(marked_ids)


def delete_details(tx: Transaction, limit: int) -> tuple[int, bool]:
    """Remove up to `limit` rows of marked runs; returns their number, and whether more may be left."""
    query = sa.select(run_deletions.c.run_id).order_by(run_deletions.c.run_id).limit(_RUNS_AT_A_TIME)
    waiting = list(tx.execute(query).scalars())
    removed = 0
    for run_id in waiting:
        for table in REMOVED:
            count, has_more = _remove_rows(tx, table, run_id, limit - removed)
            removed += count
            # Another process may have removed the rows that this one chose: only what was left counts.
            if has_more or removed >= limit:
                return removed, True
        tx.execute(run_deletions.delete().where(run_deletions.c.run_id == run_id))
    return removed, len(waiting) == _RUNS_AT_A_TIME


def _is_old(ended_before: datetime) -> sa.ColumnElement[bool]:
    in_service = sa.and_(endpoints.c.enabled, endpoints.c.deleted_at.is_(None))
    waits = (
        sa.select(deliveries.c.id)
        .join(endpoints, endpoints.c.id == deliveries.c.endpoint_id)
        .where(deliveries.c.run_id == runs.c.id, deliveries.c.state == sa.literal_column("'waiting'"), in_service)
    )
    unconfirmed = sa.exists().where(decisions.c.run_id == runs.c.id, decisions.c.deadline_at.is_not(None))
    return sa.and_(runs.c.pruned_at.is_(None), runs.c.ended_at < ended_before, ~waits.exists(), ~unconfirmed)


def _remove_rows(tx: Transaction, table: sa.Table, run_id: UUID, limit: int) -> tuple[int, bool]:
    """Remove the first rows of a run by their key, up to `limit`; returns how many, and whether more may be left."""
    key = [column for column in table.primary_key if column.name != "run_id"]
    removed, last = table.delete().where(table.c.run_id == run_id), None
    if key:
        # Two statements: in one, PostgreSQL may join with all rows of the run.
        last = tx.execute(
            sa.select(*key).where(table.c.run_id == run_id).order_by(*key).offset(limit - 1).limit(1)
        ).first()
        if last is not None:
            bound = (sa.literal(value, column.type) for value, column in zip(last, key, strict=True))
            removed = removed.where(sa.tuple_(*key) <= sa.tuple_(*bound))
    return tx.execute(removed).rowcount, last is not None
