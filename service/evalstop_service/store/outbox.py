"""The outbox: events written in the transaction that caused them, and what waits to carry them out.

waiting ──> delivered         a worker holds a waiting delivery for a time: see `leases`
   │  └───> dead ──> waiting  (by hand)
   └──────> cancelled         vetoed, overtaken by a new attempt, or its endpoint deleted
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import rfc3339
from evalstop_service.store import endpoints, wake
from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import decisions, deliveries, events

STOP_REQUESTED = "run.stop_requested"

EVENT_TYPES = (
    "run.suspected",
    "run.eval_requested",
    STOP_REQUESTED,
    "run.stop_withheld",
    "run.stop_escalated",
    "run.stopped",
    "run.stop_failed",
    "run.resume_requested",
    "run.best_checkpoint_changed",
    "run.stale",
    "run.lost",
    "detector.dead",
)


def announce(
    tx: Transaction,
    *,
    project_id: UUID,
    run_id: UUID,
    type: str,  # noqa: A002 - its name on the wire
    data: dict[str, Any],
    now: datetime,
    due_at: datetime | None = None,
    decision_id: UUID | None = None,
) -> UUID:
    """Write an event and one delivery for each endpoint that subscribed to it; returns the event's id (`webhook-id`).

    `data` must be plain JSON without NaN. `due_at`: not sent before (the end of a grace period); None means at once,
    whatever the clocks of this machine and of the database's say. The workers are woken by the commit.
    """
    event_id = new_id()
    body = json.dumps({"type": type, "timestamp": rfc3339(now), "data": data}, separators=(",", ":"), allow_nan=False)
    tx.execute(
        sa.insert(events).values(
            run_id=run_id,
            id=event_id,
            project_id=project_id,
            decision_id=decision_id,
            type=type,
            body=body,
            created_at=now,
        )
    )
    targets = [one for one in endpoints.listing(tx, project_id) if one.enabled and one.wants(type)]
    if targets:
        at_once = due_at is None or due_at <= now
        rows = [
            {
                "run_id": run_id,
                "id": new_id(),
                "event_id": event_id,
                "endpoint_id": endpoint.id,
                "state": "waiting",
                "attempts": 0,
                "due_at": now if at_once else due_at,
                "created_at": now,
            }
            for endpoint in targets
        ]
        statement = sa.insert(deliveries)
        if at_once and tx.dialect.name == "postgresql":  # where a clock ahead of the database's would cost that time
            due = sa.func.least(sa.bindparam("due_at"), sa.func.now())
            statement = statement.values(due_at=due)
        tx.execute(statement, rows)
        wake.workers(tx)
    return event_id


def cancel(
    tx: Transaction, run_id: UUID, decision_id: UUID, now: datetime, why: str = "the decision was vetoed"
) -> int:
    """Cancel what waits to be sent for a decision that no longer holds; returns how many.

    What a worker has in its hands at this moment may still arrive.
    """
    of_decision = sa.select(events.c.id).where(events.c.run_id == run_id, events.c.decision_id == decision_id)
    return _cancel(tx, run_id, of_decision, now, why)


def cancel_attempt(tx: Transaction, run_id: UUID, attempt: int, now: datetime) -> int:
    """Cancel the stop of an attempt that is over, lest it reach the job that goes on in its place; returns how many.

    News of that attempt, such as `run.stopped`, still goes out.
    """
    of_attempt = sa.select(decisions.c.id).where(decisions.c.run_id == run_id, decisions.c.attempt == attempt)
    stops = sa.select(events.c.id).where(
        events.c.run_id == run_id, events.c.decision_id.in_(of_attempt), events.c.type == STOP_REQUESTED
    )
    return _cancel(tx, run_id, stops, now, "the run went on in a new attempt")


def _cancel(tx: Transaction, run_id: UUID, event_ids: sa.Select[Any], now: datetime, why: str) -> int:
    waiting = sa.select(deliveries.c.id).where(
        deliveries.c.run_id == run_id, deliveries.c.event_id.in_(event_ids), deliveries.c.state == "waiting"
    )
    # Locked in the order of keys, as workers settle them: else the two can wait in a ring.
    found = list(tx.execute(waiting.order_by(deliveries.c.id).with_for_update()).scalars())
    if not found:
        return 0
    return tx.execute(
        sa.update(deliveries)
        .where(deliveries.c.run_id == run_id, deliveries.c.id.in_(found), deliveries.c.state == "waiting")
        .values(state="cancelled", last_error=why, settled_at=now)
    ).rowcount
