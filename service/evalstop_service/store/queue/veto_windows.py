"""Extends veto windows when no veto could be received: the stop waits that long, and run caches are invalidated."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.rules.decision_lifecycle import DecisionState, Record
from evalstop_service.rules.statuses import DeliveryState
from evalstop_service.store import decisions as decision_rows
from evalstop_service.store import runs as run_rows
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import PENDING
from evalstop_service.store.due_decisions import UNSEEN
from evalstop_service.store.queue.outbox import select_stops
from evalstop_service.store.tables import decisions, deliveries, projects, runs

EXTENSION_SECONDS = 60.0
"""The extension after an outage; a project with a shorter veto window gets that instead."""


def extend_windows(
    tx: Transaction,
    now: datetime,
    reason: str,
    ended_before: datetime | None = None,
    project_ids: Collection[UUID] | None = None,
) -> int:
    """Extend the veto windows of pending stops; returns how many. A longer window stays as it is.

    `ended_before`: only windows that ended before. `project_ids`: only these projects. Runs are locked first, in the
    order of their ids.
    """
    is_extended = PENDING if ended_before is None else PENDING & (decisions.c.due_at < ended_before)
    if project_ids is not None:
        is_extended &= decisions.c.project_id.in_(project_ids)
    run_ids = tx.execute(sa.select(decisions.c.run_id).where(is_extended).distinct()).scalars().all()
    if not run_ids:
        return 0
    run_rows.lock_runs(tx, run_ids)
    query = (
        sa.select(decisions.c.run_id, decisions.c.id, decisions.c.due_at, projects.c.veto_window_seconds)
        .join(projects, projects.c.id == decisions.c.project_id)
        .where(is_extended, decisions.c.run_id.in_(run_ids))
        .order_by(decisions.c.run_id, decisions.c.id)
    )
    extended: list[UUID] = []
    for run_id, decision_id, ends_at, window_seconds in tx.execute(query).all():
        due_at = now + timedelta(seconds=min(EXTENSION_SECONDS, window_seconds))
        if due_at > ends_at and _extend_window(tx, run_id, decision_id, due_at):
            entry = Record(DecisionState.PENDING, "service", reason)
            decision_rows.add_change(tx, run_id, decision_id, entry, now)
            extended.append(run_id)
    # Processes that cache these runs reload their decisions.
    tx.execute(sa.update(runs).where(runs.c.id.in_(extended)).values(version=runs.c.version + 1))
    return len(extended)


def extend_unseen_windows(tx: Transaction, now: datetime) -> int:
    """Extend the windows that ended while nothing could be written; returns how many."""
    return extend_windows(tx, now, "the veto window ended while the service could not write", now - UNSEEN)


def _extend_window(tx: Transaction, run_id: UUID, decision_id: UUID, due_at: datetime) -> bool:
    is_decision = (decisions.c.run_id == run_id, decisions.c.id == decision_id, PENDING)
    if not tx.execute(sa.update(decisions).where(*is_decision).values(due_at=due_at)).rowcount:
        return False
    delay_stop(tx, run_id, decision_id, due_at)
    return True


def delay_stop(tx: Transaction, run_id: UUID, decision_id: UUID, due_at: datetime) -> None:
    """Have the deliveries of a stop that nobody has claimed wait until then."""
    waiting = (
        deliveries.c.run_id == run_id,
        deliveries.c.event_id.in_(select_stops(run_id, decision_id)),
        deliveries.c.state == DeliveryState.WAITING,
        deliveries.c.attempts == 0,
    )
    tx.execute(sa.update(deliveries).where(*waiting).values(due_at=due_at))
