"""The outbox: events written in the transaction that caused them, and the deliveries that carry them out.

waiting ──> delivered         a worker holds a waiting delivery by moving `due_at` to the end of its lease
   │  └───> dead ──> waiting  (by hand)
   └──────> cancelled         vetoed, or its endpoint deleted
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store import endpoints
from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import deliveries, events

EVENT_TYPES = (
    "run.suspected",
    "run.stop_requested",
    "run.stopped",
    "run.stop_failed",
    "run.best_checkpoint_changed",
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

    `data` must be plain JSON without NaN. `due_at`: not sent before (the end of a grace period); None means at once.
    """
    event_id = new_id()
    timestamp = now.astimezone(UTC).isoformat().replace("+00:00", "Z")
    body = json.dumps({"type": type, "timestamp": timestamp, "data": data}, separators=(",", ":"), allow_nan=False)
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
    rows = [
        {
            "run_id": run_id,
            "id": new_id(),
            "event_id": event_id,
            "endpoint_id": endpoint.id,
            "state": "waiting",
            "attempts": 0,
            "due_at": due_at or now,
            "created_at": now,
        }
        for endpoint in endpoints.listing(tx, project_id)
        if endpoint.enabled and endpoint.wants(type)
    ]
    if rows:
        tx.execute(sa.insert(deliveries), rows)
    return event_id


def cancel(tx: Transaction, run_id: UUID, decision_id: UUID, now: datetime) -> int:
    """Cancel what waits to be sent for a decision that was vetoed; returns how many."""
    of_decision = sa.select(events.c.id).where(events.c.run_id == run_id, events.c.decision_id == decision_id)
    return tx.execute(
        sa.update(deliveries)
        .where(
            deliveries.c.run_id == run_id,
            deliveries.c.event_id.in_(of_decision),
            deliveries.c.state == "waiting",
        )
        .values(state="cancelled", last_error="the decision was vetoed", settled_at=now)
    ).rowcount
