"""Leases: a delivery in the hands of one worker for a time, from being claimed to being settled.

A worker holds a waiting delivery by moving its `due_at` to the end of the lease. Each claim counts `attempts` up, and
that number tells leases apart: whoever comes back with an older one changes nothing.

Times are compared with one clock for all workers: PostgreSQL's own, and on the embedded database the machine's. Should
it be set back, nothing is claimed twice; what would have to wait for the clock to catch up is found by
`queues.left_behind`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from evalstop_service.store import endpoints, queues
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import UtcTime, deliveries, delivery_attempts, events
from evalstop_service.store.tables import endpoints as targets


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery in the hands of one worker until `lease_until`; `attempts` counts this one. It was due at `due_at`."""

    run_id: UUID
    id: UUID
    event_id: UUID
    endpoint_id: UUID
    attempts: int
    due_at: datetime
    lease_until: datetime
    url: str
    secrets: tuple[str, ...]
    body: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """The endpoint took the event."""


@dataclass(frozen=True, slots=True)
class Retry:
    """It may work later: send again, not before `due_at`."""

    due_at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class Dead:
    """Sending again would change nothing; `gone`: the endpoint wants no event any more."""

    error: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class GivenBack:
    """It was not tried: any worker may have it at once."""


Result = Delivered | Retry | Dead | GivenBack


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a claimed delivery, and when."""

    claimed: Claimed
    result: Result
    at: datetime
    duration_ms: float = 0.0
    status_code: int | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """What was recorded: the deliveries still held, and those cancelled meanwhile. All others had been taken over."""

    kept: frozenset[UUID]
    cancelled: frozenset[UUID]


def claim(
    tx: Transaction,
    now: datetime,
    lease_seconds: float,
    limit: int,
    per_endpoint: int,
    room: Mapping[UUID, int] | None = None,
) -> list[Claimed]:
    """Take up to `limit` deliveries that are due, longest due first, and at most `per_endpoint` of one endpoint.

    `room`: endpoints for which it is another number than `per_endpoint`. No other worker gets what was claimed until
    `lease_seconds` are over; workers that claim at the same time pass over what the other takes.
    """
    if limit <= 0:
        return []
    lease_until = now + timedelta(seconds=lease_seconds)
    if tx.dialect.name == "postgresql":
        values = queues.among(now, limit, per_endpoint, room or {}) | {"lease_until": lease_until}
        return [_claimed(row, lease_until, now) for row in tx.execute(_CLAIM_POSTGRESQL, values)]
    found = queues.due(tx, now, limit, per_endpoint, room)
    if not found:
        return []
    held = sa.tuple_(deliveries.c.run_id, deliveries.c.id).in_([(one.run_id, one.id) for one in found])
    query = _CONTENTS.where(held).order_by(deliveries.c.due_at, deliveries.c.id)
    rows = tx.execute(query).all()
    tx.execute(sa.update(deliveries).where(held).values(due_at=lease_until, attempts=deliveries.c.attempts + 1))
    return [_claimed(row, lease_until, now) for row in rows]


def settle(tx: Transaction, ended: Sequence[Ended]) -> Settled:
    """Record what became of many attempts. Nothing is changed where the lease ran out and another worker took over."""
    if not ended:
        return Settled(frozenset(), frozenset())
    gone = sorted({one.claimed.endpoint_id for one in ended if isinstance(one.result, Dead) and one.result.gone})
    if gone:  # the endpoint's row before the delivery's, as deleting an endpoint does: else the two can deadlock
        lock = sa.select(targets.c.id).where(targets.c.id.in_(gone)).order_by(targets.c.id)
        tx.execute(lock.with_for_update(key_share=True))
    write = _settle_postgresql if tx.dialect.name == "postgresql" else _settle_sqlite
    present = write(tx, ended)
    kept = [one for one in ended if present.get(one.claimed.id) == ("waiting", one.claimed.attempts)]
    for endpoint_id in sorted(
        {one.claimed.endpoint_id for one in kept if isinstance(one.result, Dead) and one.result.gone}
    ):
        endpoints.disable(tx, endpoint_id)
    return Settled(
        frozenset(one.claimed.id for one in kept),
        frozenset(key for key, (state, _) in present.items() if state == "cancelled"),
    )


def _settle_postgresql(tx: Transaction, ended: Sequence[Ended]) -> dict[UUID, tuple[str, int]]:
    columns = {name: [row[name] for row in map(_row, ended)] for name in _ENDED_TYPES}
    return {row.id: (row.state, row.attempts) for row in tx.execute(_SETTLE_POSTGRESQL, columns)}


def _settle_sqlite(tx: Transaction, ended: Sequence[Ended]) -> dict[UUID, tuple[str, int]]:
    keys = [(one.claimed.run_id, one.claimed.id) for one in ended]
    query = sa.select(deliveries.c.id, deliveries.c.state, deliveries.c.attempts)
    query = query.where(sa.tuple_(deliveries.c.run_id, deliveries.c.id).in_(keys))
    present = {row.id: (row.state, row.attempts) for row in tx.execute(query)}
    kept = [_row(one) for one in ended if present.get(one.claimed.id) == ("waiting", one.claimed.attempts)]
    if kept:
        tx.execute(_CHANGE, kept)
    if tried := [row for row in kept if row["tried"]]:
        tx.execute(_LOG, tried)
    return present


def _row(ended: Ended) -> dict[str, Any]:
    """What becomes of the delivery's row, and what is kept of the attempt."""
    claimed, result = ended.claimed, ended.result
    state, due_at, error = "waiting", claimed.due_at, None
    match result:
        case Delivered():
            state = "delivered"
        case Retry():
            due_at, error = result.due_at, result.error
        case Dead():
            state, error = "dead", result.error
        case GivenBack():
            due_at = ended.at
    return {
        "of_run": claimed.run_id,
        "of_id": claimed.id,
        "number": claimed.attempts,
        "new_state": state,
        "new_due_at": due_at,
        "error": error,
        "ended_at": ended.at,
        "took_ms": ended.duration_ms,
        "code": ended.status_code,
        "tried": not isinstance(result, GivenBack),
    }


def _claimed(row: Any, lease_until: datetime, now: datetime) -> Claimed:
    return Claimed(
        run_id=row.run_id,
        id=row.id,
        event_id=row.event_id,
        endpoint_id=row.endpoint_id,
        attempts=row.attempts + 1,
        due_at=row.due_at,
        lease_until=lease_until,
        url=row.url,
        secrets=endpoints.valid_secrets(row.secret, row.previous_secret, row.previous_secret_until, now),
        body=row.body,
    )


_CONTENTS = (
    sa.select(
        deliveries.c.run_id,
        deliveries.c.id,
        deliveries.c.event_id,
        deliveries.c.endpoint_id,
        deliveries.c.attempts,
        deliveries.c.due_at,
        targets.c.url,
        targets.c.secret,
        targets.c.previous_secret,
        targets.c.previous_secret_until,
        events.c.body,
    )
    .join(targets, targets.c.id == deliveries.c.endpoint_id)
    .join(events, (events.c.run_id == deliveries.c.run_id) & (events.c.id == deliveries.c.event_id))
)

_settled_at = sa.case((sa.bindparam("new_state") != "waiting", sa.bindparam("ended_at", type_=UtcTime)))
_last_error = sa.case(
    (sa.bindparam("new_state") == "delivered", None),
    else_=sa.func.coalesce(sa.bindparam("error", type_=sa.Text), deliveries.c.last_error),
)

_CHANGE = (
    sa.update(deliveries)
    .where(deliveries.c.run_id == sa.bindparam("of_run"), deliveries.c.id == sa.bindparam("of_id"))
    .values(
        state=sa.bindparam("new_state"),
        due_at=sa.bindparam("new_due_at"),
        last_error=_last_error,
        settled_at=_settled_at,
    )
)

_LOG = sa.insert(delivery_attempts).values(
    run_id=sa.bindparam("of_run"),
    delivery_id=sa.bindparam("of_id"),
    number=sa.bindparam("number"),
    at=sa.bindparam("ended_at"),
    duration_ms=sa.bindparam("took_ms"),
    status_code=sa.bindparam("code"),
    error=sa.bindparam("error"),
)

# On PostgreSQL one statement each, since every further one is a trip there and back.
_CLAIM_POSTGRESQL = (
    sa.text(
        queues.QUEUES  # noqa: S608 - of constants alone
        + ", head AS MATERIALIZED ("
        + queues.HEAD_POSTGRESQL
        + """
), taken AS (
    UPDATE deliveries SET due_at = :lease_until, attempts = deliveries.attempts + 1 FROM head
    WHERE deliveries.run_id = head.run_id AND deliveries.id = head.id
    RETURNING deliveries.run_id, deliveries.id, deliveries.event_id, deliveries.endpoint_id, head.attempts, head.due_at
)
SELECT taken.run_id, taken.id, taken.event_id, taken.endpoint_id, taken.attempts, taken.due_at,
    endpoints.url, endpoints.secret, endpoints.previous_secret, endpoints.previous_secret_until, events.body
FROM taken
JOIN endpoints ON endpoints.id = taken.endpoint_id
JOIN events ON events.run_id = taken.run_id AND events.id = taken.event_id
ORDER BY taken.due_at, taken.id
"""
    )
    .bindparams(*queues.HEAD_PARAMETERS, sa.bindparam("lease_until", type_=UtcTime))
    .columns(
        run_id=sa.Uuid,
        id=sa.Uuid,
        event_id=sa.Uuid,
        endpoint_id=sa.Uuid,
        due_at=UtcTime,
        previous_secret_until=UtcTime,
    )
)

_ENDED_TYPES: dict[str, Any] = {
    "of_run": sa.Uuid(),
    "of_id": sa.Uuid(),
    "number": sa.Integer(),
    "new_state": sa.Text(),
    "new_due_at": UtcTime(),
    "error": sa.Text(),
    "ended_at": UtcTime(),
    "took_ms": sa.Double(),
    "code": sa.Integer(),
    "tried": sa.Boolean(),
}

# Rows are locked in the order of their keys, as those lock them who cancel many at once.
_SETTLE_POSTGRESQL = (
    sa.text(
        "WITH ended AS MATERIALIZED (SELECT * FROM unnest("  # noqa: S608 - of constants alone
        + ", ".join(f":{name}" for name in _ENDED_TYPES)
        + ") AS ended ("
        + ", ".join(_ENDED_TYPES)
        + """)
), present AS MATERIALIZED (
    SELECT deliveries.run_id, deliveries.id, deliveries.state, deliveries.attempts FROM deliveries
    JOIN ended ON deliveries.run_id = ended.of_run AND deliveries.id = ended.of_id
    ORDER BY deliveries.run_id, deliveries.id FOR UPDATE OF deliveries
), settled AS (
    UPDATE deliveries SET state = new_state, due_at = new_due_at,
        last_error = CASE WHEN new_state = 'delivered' THEN NULL ELSE coalesce(error, last_error) END,
        settled_at = CASE WHEN new_state <> 'waiting' THEN ended_at END
    FROM ended JOIN present ON present.run_id = of_run AND present.id = of_id AND present.attempts = number
    WHERE deliveries.run_id = of_run AND deliveries.id = of_id AND present.state = 'waiting'
    RETURNING of_id, number
), logged AS (
    INSERT INTO delivery_attempts (run_id, delivery_id, number, at, duration_ms, status_code, error)
    SELECT of_run, of_id, number, ended_at, took_ms, code, error
    FROM ended JOIN settled USING (of_id, number) WHERE tried
)
SELECT id, state, attempts FROM present
"""
    )
    .bindparams(*(sa.bindparam(name, type_=ARRAY(kind)) for name, kind in _ENDED_TYPES.items()))
    .columns(id=sa.Uuid)
)
