"""The outbox: events written in the transaction that caused them, and the deliveries that carry them out.

waiting ──> delivered         a worker holds a waiting delivery by moving `due_at` to the end of its lease
   │  └───> dead ──> waiting  (by hand)
   └──────> cancelled         vetoed, or its endpoint deleted
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import rfc3339
from evalstop_service.store import endpoints
from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import deliveries, delivery_attempts, events
from evalstop_service.store.tables import endpoints as targets

EVENT_TYPES = (
    "run.suspected",
    "run.stop_requested",
    "run.stopped",
    "run.stop_failed",
    "run.best_checkpoint_changed",
)


@dataclass(frozen=True)
class Due:
    """The key of a delivery that may be claimed."""

    run_id: UUID
    id: UUID


@dataclass(frozen=True)
class Claimed:
    """A delivery in the hands of one worker until `lease_until`; `attempts` counts this one and tells leases apart."""

    run_id: UUID
    id: UUID
    event_id: UUID
    endpoint_id: UUID
    attempts: int
    lease_until: datetime
    url: str
    secrets: tuple[str, ...]
    body: str


@dataclass(frozen=True)
class Delivered:
    """The endpoint took the event."""


@dataclass(frozen=True)
class Retry:
    """It may work later: send again, not before `due_at`."""

    due_at: datetime
    error: str


@dataclass(frozen=True)
class Dead:
    """Sending again would change nothing; `gone`: the endpoint wants no event any more."""

    error: str
    gone: bool = False


Result = Delivered | Retry | Dead


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


def due(
    tx: Transaction,
    now: datetime,
    limit: int,
    per_endpoint: int | None = None,
    in_flight: Mapping[UUID, int] | None = None,
) -> list[Due]:
    """Up to `limit` deliveries to claim, longest due first: a read, so that idle workers leave the write lock alone.

    `per_endpoint`: at most so many of one endpoint, less what is `in_flight` to it already, so that an endpoint that
    hangs cannot hold up the others; None means no such limit.
    """
    if per_endpoint is None:
        query = sa.select(deliveries.c.run_id, deliveries.c.id).where(_is_due(now))
        query = query.order_by(deliveries.c.due_at, deliveries.c.id)
    else:
        full = [endpoint for endpoint, count in (in_flight or {}).items() if count >= per_endpoint]
        order = (deliveries.c.due_at, deliveries.c.id)
        rank = sa.func.row_number().over(partition_by=deliveries.c.endpoint_id, order_by=order).label("rank")
        ranked = sa.select(deliveries.c.run_id, deliveries.c.id, deliveries.c.endpoint_id, deliveries.c.due_at, rank)
        queue = ranked.where(_is_due(now), deliveries.c.endpoint_id.not_in(full)).subquery()
        room = {endpoint: per_endpoint - count for endpoint, count in (in_flight or {}).items()}
        most = sa.case(room, value=queue.c.endpoint_id, else_=per_endpoint) if room else sa.literal(per_endpoint)
        query = sa.select(queue.c.run_id, queue.c.id).where(queue.c.rank <= most)
        query = query.order_by(queue.c.due_at, queue.c.id)
    return [Due(*row) for row in tx.execute(query.limit(limit))]


def claim(
    tx: Transaction, now: datetime, lease_seconds: float, limit: int, wanted: Sequence[Due] | None = None
) -> list[Claimed]:
    """Take up to `limit` deliveries that are due, longest due first, for `lease_seconds`; no other worker gets them.

    `wanted`: of what `due` found just before, what is due still; None looks by itself.
    """
    found = due(tx, now, limit) if wanted is None else wanted[:limit]
    # By key, and not by a subquery: statistics of a queue are always stale, and a planner may run it once for each row.
    keys = [(one.run_id, one.id) for one in found]
    if not keys:
        return []
    columns = (*_CLAIMED, targets.c.url, targets.c.secret, targets.c.previous_secret, targets.c.previous_secret_until)
    query = (
        sa.select(*columns, events.c.body)
        .join(targets, targets.c.id == deliveries.c.endpoint_id)
        .join(events, (events.c.run_id == deliveries.c.run_id) & (events.c.id == deliveries.c.event_id))
        .where(sa.tuple_(deliveries.c.run_id, deliveries.c.id).in_(keys), _is_due(now))
        .order_by(deliveries.c.due_at, deliveries.c.id)
        .with_for_update(skip_locked=True, of=deliveries)
    )
    lease_until = now + timedelta(seconds=lease_seconds)
    claimed = [_claimed(row, lease_until, now) for row in tx.execute(query).mappings()]
    if claimed:
        taken = [(one.run_id, one.id) for one in claimed]
        tx.execute(
            sa.update(deliveries)
            .where(sa.tuple_(deliveries.c.run_id, deliveries.c.id).in_(taken))
            .values(due_at=lease_until, attempts=deliveries.c.attempts + 1)
        )
    return claimed


def settle(
    tx: Transaction,
    claimed: Claimed,
    result: Result,
    *,
    at: datetime,
    duration_ms: float,
    status_code: int | None = None,
) -> bool:
    """Record what became of an attempt. False, and nothing is changed, when the lease ran out and another took over."""
    values: dict[str, Any]
    match result:
        case Delivered():
            error, values = None, {"state": "delivered", "last_error": None, "settled_at": at}
        case Retry():
            error, values = result.error, {"due_at": result.due_at, "last_error": result.error}
        case Dead():
            error, values = result.error, {"state": "dead", "last_error": result.error, "settled_at": at}
    gone = isinstance(result, Dead) and result.gone
    if gone:  # the endpoint's row before the delivery's, as deleting an endpoint does: else the two can deadlock
        tx.execute(sa.select(targets.c.id).where(targets.c.id == claimed.endpoint_id).with_for_update())
    held = sa.and_(
        deliveries.c.run_id == claimed.run_id,
        deliveries.c.id == claimed.id,
        deliveries.c.state == "waiting",
        deliveries.c.attempts == claimed.attempts,
    )
    if tx.execute(sa.update(deliveries).where(held).values(values)).rowcount != 1:
        return False
    tx.execute(
        sa.insert(delivery_attempts).values(
            run_id=claimed.run_id,
            delivery_id=claimed.id,
            number=claimed.attempts,
            at=at,
            duration_ms=duration_ms,
            status_code=status_code,
            error=error,
        )
    )
    if gone:
        endpoints.disable(tx, claimed.endpoint_id)
    return True


_CLAIMED = (
    deliveries.c.run_id,
    deliveries.c.id,
    deliveries.c.event_id,
    deliveries.c.endpoint_id,
    deliveries.c.attempts,
)


def _is_due(now: datetime) -> sa.ColumnElement[bool]:
    # The state is spelled out, not bound, so that a plan made for any parameters may use the partial index too.
    waiting = deliveries.c.state == sa.literal_column("'waiting'")
    served = sa.select(targets.c.id).where(targets.c.enabled, targets.c.deleted_at.is_(None)).scalar_subquery()
    return sa.and_(waiting, deliveries.c.due_at <= now, deliveries.c.endpoint_id.in_(served))


def _claimed(row: Any, lease_until: datetime, now: datetime) -> Claimed:
    return Claimed(
        run_id=row["run_id"],
        id=row["id"],
        event_id=row["event_id"],
        endpoint_id=row["endpoint_id"],
        attempts=row["attempts"] + 1,
        lease_until=lease_until,
        url=row["url"],
        secrets=endpoints.valid_secrets(row["secret"], row["previous_secret"], row["previous_secret_until"], now),
        body=row["body"],
    )
