"""Queues: the deliveries that wait for each endpoint, and when they are due.

Due deliveries are looked up endpoint by endpoint, each from the head of its own queue in the index, so that a lookup
costs the same with ten as with a hundred thousand deliveries waiting.

The events of one run reach one endpoint in the order of their creation: a delivery has its turn when no earlier one of
its run still waits for the same endpoint, leased or between two attempts. Urgent deliveries go before others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction, driver_connection
from evalstop_service.store.tables import UtcTime, deliveries, endpoints


@dataclass(frozen=True, slots=True)
class DueDelivery:
    """The key of a delivery that may be claimed; `open_until`: set if it is the trial attempt at a failing endpoint."""

    run_id: UUID
    id: UUID
    endpoint_id: UUID
    attempts: int
    due_at: datetime
    open_until: datetime | None = None


def find_due_deliveries(
    tx: Transaction, now: datetime, limit: int, per_endpoint: int, room: Mapping[UUID, int] | None = None
) -> list[DueDelivery]:
    """Up to `limit` deliveries to claim, longest due first, and at most `per_endpoint` of one endpoint.

    `room`: endpoints with a limit other than `per_endpoint`. On PostgreSQL the result is locked, and rows that another
    transaction has locked are skipped.
    """
    room = room or {}
    if tx.dialect.name == "postgresql":
        rows = (
            driver_connection(tx)
            .cursor(binary=True)
            .execute(QUEUES + HEAD_POSTGRESQL, claim_parameters(now, limit, per_endpoint, room))
        )
        return [DueDelivery(*row) for row in rows]
    most = max(0, per_endpoint, *room.values())
    room_left = dict(room)
    due: list[DueDelivery] = []
    for row in tx.execute(_DUE_SQLITE, {"now": now, "most": most}):
        delivery = DueDelivery(*row)
        left = room_left.get(delivery.endpoint_id, per_endpoint)
        left = left if delivery.open_until is None else min(left, 1)
        if left > 0 and len(due) < limit:
            due.append(delivery)
            left -= 1
        room_left[delivery.endpoint_id] = left
    return due


def claim_parameters(now: datetime, limit: int, per_endpoint: int, room: Mapping[UUID, int]) -> dict[str, Any]:
    """The parameters of `HEAD_POSTGRESQL`."""
    rooms = {"known": list(room), "room": [max(0, limit_of_endpoint) for limit_of_endpoint in room.values()]}
    return {"now": now, "per_endpoint": per_endpoint, "limit": limit} | rooms


def find_next_due(tx: Transaction, now: datetime) -> datetime | None:
    """The next time after `now` at which a delivery is due; None: nothing waits."""
    next_due: datetime | None = tx.execute(_NEXT, {"now": now}).scalar_one()
    return next_due


# The endpoints with a waiting delivery, each found by one index lookup after the previous one. The state is
# inlined, not bound, so that a generic plan can use the partial index.
QUEUES = """
WITH RECURSIVE queue (endpoint_id) AS (
    SELECT * FROM (
        SELECT endpoint_id FROM deliveries WHERE state = 'waiting' ORDER BY endpoint_id LIMIT 1
    ) AS first
    UNION ALL
    SELECT (
        SELECT deliveries.endpoint_id FROM deliveries
        WHERE deliveries.state = 'waiting' AND deliveries.endpoint_id > queue.endpoint_id
        ORDER BY deliveries.endpoint_id LIMIT 1
    ) FROM queue WHERE queue.endpoint_id IS NOT NULL
)
"""

_HEAD = """SELECT head.run_id, head.id, head.endpoint_id, head.attempts, head.due_at, endpoints.open_until
FROM queue"""

# Deliveries of a pull endpoint are fetched by its receiver: see `pull`.
_SERVED = """
JOIN endpoints ON endpoints.id = queue.endpoint_id AND endpoints.enabled AND endpoints.deleted_at IS NULL
    AND substr(endpoints.url, 1, 5) <> 'pull:'
"""

_NOT_OPEN = " AND (endpoints.open_until IS NULL OR endpoints.open_until <= {now})"

HAS_ITS_TURN = """(
    SELECT 1 FROM deliveries AS earlier
    WHERE earlier.endpoint_id = deliveries.endpoint_id AND earlier.run_id = deliveries.run_id
        AND earlier.state = 'waiting' AND earlier.id < deliveries.id
        AND (earlier.urgent OR NOT deliveries.urgent) AND (earlier.attempts > 0 OR earlier.due_at <= {now})
    LIMIT 1
) IS NULL"""
"""A condition on `deliveries`. Not NOT EXISTS, which PostgreSQL may turn into a join with all waiting deliveries."""

HEAD_POSTGRESQL = (
    _HEAD  # noqa: S608 - of constants alone
    + _SERVED
    + _NOT_OPEN.format(now="%(now)s")
    + """
LEFT JOIN unnest(%(known)s::uuid[], %(room)s::integer[]) AS known (endpoint_id, room)
    ON known.endpoint_id = queue.endpoint_id
CROSS JOIN LATERAL (
    SELECT run_id, id, endpoint_id, attempts, due_at FROM deliveries
    WHERE deliveries.endpoint_id = queue.endpoint_id AND state = 'waiting' AND due_at <= %(now)s
        AND """
    + HAS_ITS_TURN.format(now="%(now)s")
    + """
    ORDER BY due_at, id
    LIMIT least(coalesce(known.room, %(per_endpoint)s), CASE WHEN endpoints.open_until IS NOT NULL THEN 1 END)
    FOR UPDATE SKIP LOCKED
) AS head
ORDER BY head.due_at, head.id LIMIT %(limit)s
"""
)
"""The due deliveries, locked, one queue after another; append it to `QUEUES`, with `claim_parameters`."""

_DUE_SQLITE = (
    sa.text(
        QUEUES  # noqa: S608 - of constants alone
        + _HEAD
        + _SERVED
        + _NOT_OPEN.format(now=":now")
        + """
JOIN deliveries AS head ON head.id IN (
    SELECT id FROM deliveries
    WHERE deliveries.endpoint_id = queue.endpoint_id AND state = 'waiting' AND due_at <= :now
        AND """
        + HAS_ITS_TURN.format(now=":now")
        + """
    ORDER BY due_at, id LIMIT :most
)
ORDER BY head.due_at, head.id
"""
    )
    .bindparams(sa.bindparam("now", type_=UtcTime))
    .columns(
        *(deliveries.c[name] for name in ("run_id", "id", "endpoint_id", "attempts", "due_at")), endpoints.c.open_until
    )
)

_NEXT = (
    sa.text(
        QUEUES  # noqa: S608 - of constants alone
        + """
SELECT min(CASE WHEN endpoints.open_until > :now THEN endpoints.open_until ELSE (
    SELECT due_at FROM deliveries
    WHERE deliveries.endpoint_id = queue.endpoint_id AND state = 'waiting' AND due_at > :now
    ORDER BY due_at LIMIT 1
) END) AS delivery
FROM queue"""
        + _SERVED
    )
    .bindparams(sa.bindparam("now", type_=UtcTime))
    .columns(delivery=UtcTime)
)
