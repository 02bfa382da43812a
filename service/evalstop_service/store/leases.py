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

from evalstop_service.store import endpoints
from evalstop_service.store.database import Transaction
from evalstop_service.store.queues import Due, due
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


def clock(tx: Transaction, here: datetime) -> datetime:
    """The time that leases are compared with: that of PostgreSQL; on the embedded database it is this machine's."""
    if tx.dialect.name == "postgresql":
        return tx.execute(_NOW).scalar_one()
    return here


def claim(
    tx: Transaction,
    now: datetime,
    lease_seconds: float,
    limit: int,
    per_endpoint: int,
    room: Mapping[UUID, int] | None = None,
) -> list[Claimed]:
    """Take what `due` finds for `lease_seconds`; no other worker gets it while that time lasts."""
    found = due(tx, now, limit, per_endpoint, room) if limit > 0 else []
    if not found:
        return []
    held = _among(tx, found)
    lease_until = now + timedelta(seconds=lease_seconds)
    query = _CONTENTS.where(held).order_by(deliveries.c.due_at, deliveries.c.id)
    claimed = [_claimed(row, lease_until, now) for row in tx.execute(query)]
    tx.execute(sa.update(deliveries).where(held).values(due_at=lease_until, attempts=deliveries.c.attempts + 1))
    return claimed


def settle(tx: Transaction, ended: Sequence[Ended]) -> Settled:
    """Record what became of many attempts. Nothing is changed where the lease ran out and another worker took over."""
    if not ended:
        return Settled(frozenset(), frozenset())
    gone = sorted({one.claimed.endpoint_id for one in ended if isinstance(one.result, Dead) and one.result.gone})
    if gone:  # the endpoint's row before the delivery's, as deleting an endpoint does: else the two can deadlock
        lock = sa.select(targets.c.id).where(targets.c.id.in_(gone)).order_by(targets.c.id)
        tx.execute(lock.with_for_update(key_share=True))
    query = sa.select(deliveries.c.id, deliveries.c.state, deliveries.c.attempts)
    query = query.where(_among(tx, [one.claimed for one in ended]))
    query = query.order_by(deliveries.c.run_id, deliveries.c.id).with_for_update()
    present = {row.id: (row.state, row.attempts) for row in tx.execute(query)}
    kept = [one for one in ended if present.get(one.claimed.id) == ("waiting", one.claimed.attempts)]
    _record(tx, kept)
    for endpoint_id in sorted(
        {one.claimed.endpoint_id for one in kept if isinstance(one.result, Dead) and one.result.gone}
    ):
        endpoints.disable(tx, endpoint_id)
    return Settled(
        frozenset(one.claimed.id for one in kept),
        frozenset(key for key, (state, _) in present.items() if state == "cancelled"),
    )


def _record(tx: Transaction, kept: Sequence[Ended]) -> None:
    delivered = [one.claimed for one in kept if isinstance(one.result, Delivered)]
    if delivered:
        values = {"state": "delivered", "last_error": None, "settled_at": max(one.at for one in kept)}
        tx.execute(sa.update(deliveries).where(_among(tx, delivered)).values(values))
    others = [_change(one) for one in kept if not isinstance(one.result, Delivered)]
    if others:
        tx.execute(_CHANGE, others)
    attempts = [
        {
            "run_id": one.claimed.run_id,
            "delivery_id": one.claimed.id,
            "number": one.claimed.attempts,
            "at": one.at,
            "duration_ms": one.duration_ms,
            "status_code": one.status_code,
            "error": one.result.error if isinstance(one.result, Retry | Dead) else None,
        }
        for one in kept
        if not isinstance(one.result, GivenBack)
    ]
    if attempts:
        tx.execute(sa.insert(delivery_attempts), attempts)


def _change(ended: Ended) -> dict[str, Any]:
    values: dict[str, Any]
    match ended.result:
        case Retry(due_at, error):
            values = {"state": "waiting", "due_at": due_at, "last_error": error, "settled_at": None}
        case Dead(error):
            values = {"state": "dead", "due_at": ended.claimed.due_at, "last_error": error, "settled_at": ended.at}
        case _:
            values = {"state": "waiting", "due_at": ended.at, "last_error": None, "settled_at": None}
    return values | {"of_run": ended.claimed.run_id, "of_id": ended.claimed.id}


def _among(tx: Transaction, keys: Sequence[Due | Claimed]) -> sa.ColumnElement[bool]:
    """By key, and not by a subquery: statistics of a queue are always stale, and a planner may run it for each row."""
    key = sa.tuple_(deliveries.c.run_id, deliveries.c.id)
    if tx.dialect.name != "postgresql":
        return key.in_([(one.run_id, one.id) for one in keys])
    arrays = (  # two parameters however many keys, so that the statement is prepared once
        sa.literal([one.run_id for one in keys], ARRAY(sa.Uuid())),
        sa.literal([one.id for one in keys], ARRAY(sa.Uuid())),
    )
    wanted = sa.func.unnest(*arrays).table_valued("run_id", "id").render_derived("wanted")
    return key.in_(sa.select(wanted.c.run_id, wanted.c.id))


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


_NOW = sa.select(sa.type_coerce(sa.func.clock_timestamp(), UtcTime))

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

_CHANGE = (
    sa.update(deliveries)
    .where(deliveries.c.run_id == sa.bindparam("of_run"), deliveries.c.id == sa.bindparam("of_id"))
    .values(
        state=sa.bindparam("state"),
        due_at=sa.bindparam("due_at"),
        last_error=sa.func.coalesce(sa.bindparam("last_error"), deliveries.c.last_error),
        settled_at=sa.bindparam("settled_at"),
    )
)
