"""Leases: one worker holds a delivery for a limited time, from claiming it to settling it.

A worker claims a waiting delivery by moving its `due_at` to the end of the lease. Each claim increments `attempts`, and
that number identifies the lease: a worker that settles with an older number changes nothing.

Due deliveries are looked up endpoint by endpoint, each from the head of its own queue in the index, so that a lookup
costs the same with ten as with a hundred thousand deliveries waiting. The events of one run reach one endpoint in the
order of their creation: a delivery has its turn when no earlier one of its run still waits for the same endpoint,
leased or between two attempts. Urgent deliveries go before others.

A pull endpoint has the URL `pull:<name>`: its receiver claims and settles what waits for it, and workers skip it.

Times are compared with one clock for all workers: PostgreSQL's, or the machine's on the embedded database.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.event_types import REQUEST_EVENTS
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.security.encryption import Encryption, UnreadableSecret
from evalstop_service.store import endpoints, hand_overs
from evalstop_service.store.database import Transaction
from evalstop_service.store.endpoints import PULL_PREFIX, Endpoint
from evalstop_service.store.queue import attempts
from evalstop_service.store.queue.attempts import BreakerLimits, ClaimedDelivery, FinishedAttempt, Result
from evalstop_service.store.tables import UtcTime, deliveries, events
from evalstop_service.store.tables import endpoints as targets

UNREADABLE_PAUSE_SECONDS = 60.0
"""How long a delivery waits when no key decrypts its secret."""

VETO_PAUSE_SECONDS = 0.1
"""How long a stop waits when another transaction, which may veto it, holds its decision."""

MAX_PULL_LEASE_SECONDS = 600.0
"""The longest lease that a receiver can ask for."""

DueDelivery = sa.Row[*tuple[Any, ...]]
"""A delivery that may be claimed, with its event and its endpoint: a row of `_select_due`."""


def find_due_deliveries(
    tx: Transaction, now: datetime, limit: int, per_endpoint: int, busy: Collection[UUID] = ()
) -> Sequence[DueDelivery]:
    """Up to `limit` deliveries to claim, longest due first: at most `per_endpoint` of one endpoint, and none of `busy`.

    On PostgreSQL the result is locked, and rows that another transaction has locked are skipped.
    """
    parameters = {"now": now, "limit": limit, "most": per_endpoint, "busy": list(busy)}
    return tx.execute(_DUE[tx.dialect.name], parameters).all()


def find_endpoints_with_due(tx: Transaction, endpoint_ids: Collection[UUID], now: datetime) -> set[UUID]:
    """Those of these endpoints that have something to claim. This only reads, so that long polls do not take the write
    lock."""
    return set(tx.execute(_FIND_WITH_DUE, {"of_endpoints": list(endpoint_ids), "now": now}).scalars())


def claim_deliveries(
    tx: Transaction,
    now: datetime,
    lease_seconds: float,
    limit: int,
    per_endpoint: int,
    busy: Collection[UUID] = (),
    encryption: Encryption = endpoints.UNENCRYPTED,
) -> list[ClaimedDelivery]:
    """Claim what `find_due_deliveries` finds.

    1. Select what is due and lock it, skipping rows that another worker has locked, so that no two workers claim the
       same delivery and none waits for another.
    2. Move `due_at` to the end of the lease and increment `attempts`. If this worker dies, the delivery becomes due
       again by itself.
    3. Decrypt the secrets. A delivery whose secrets cannot be decrypted is put back for a minute, and its attempt is
       not counted.
    4. Hand the stops among them over, after which they cannot be vetoed. One that may be being vetoed is put back.
    """
    if limit <= 0:
        return []
    return _lease(tx, find_due_deliveries(tx, now, limit, per_endpoint, busy), now, lease_seconds, encryption)


def pull_deliveries(
    tx: Transaction,
    endpoint: Endpoint,
    now: datetime,
    lease_seconds: float,
    limit: int,
    encryption: Encryption = endpoints.UNENCRYPTED,
) -> list[ClaimedDelivery]:
    """Claim up to `limit` deliveries of a pull endpoint, as `claim_deliveries` does.

    Raises UnreadableSecret when no configured key decrypts the endpoint's secrets.
    """
    encryption.decrypt(endpoint.secret, endpoint.id)
    due = tx.execute(_DUE_OF_ENDPOINT[tx.dialect.name], {"of_endpoint": endpoint.id, "now": now, "most": limit}).all()
    return _lease(tx, due, now, lease_seconds, encryption)


def settle_deliveries(
    tx: Transaction, ended: Sequence[FinishedAttempt], breaker: BreakerLimits | None = None
) -> dict[UUID, DeliveryState]:
    """Record the results of many attempts. Where the lease expired and another worker took over, nothing changes.

    Returns the state in which each of the other deliveries was: waiting, or cancelled during the attempt. `breaker`:
    when a failing endpoint is left alone; None: never.

    1. Lock the endpoints that will change before their deliveries: deleting an endpoint locks in the same order, so the
       two cannot deadlock.
    2. Update each delivery that still waits under the same attempt, and log the attempt.
    3. Disable the endpoints that answered that they are gone for good.
    4. Count consecutive failures, and open the circuit breakers of endpoints that reached the limit. A delivery that
       was cancelled during its attempt shows as well whether its endpoint works.
    """
    if not ended:
        return {}
    failing = {
        attempt.claimed.endpoint_id
        for attempt in ended
        if breaker is not None and (attempt.claimed.failures or not attempt.went_well)
    }
    if changing := failing | {attempt.claimed.endpoint_id for attempt in ended if attempt.is_gone}:
        lock = sa.select(targets.c.id).where(targets.c.id.in_(changing)).order_by(targets.c.id)
        tx.execute(lock.with_for_update(key_share=True))
    held = attempts.save_results(tx, ended)
    own = [attempt for attempt in ended if attempt.claimed.id in held]
    if gone := {attempt.claimed.endpoint_id for attempt in own if attempt.is_gone}:
        tx.execute(targets.update().where(targets.c.id.in_(gone)).values(enabled=False))
    if breaker is not None:
        attempts.record_results(tx, [attempt for attempt in own if attempt.claimed.endpoint_id in failing], breaker)
    return held


def settle_pulled(
    tx: Transaction, endpoint: Endpoint, delivery_id: UUID, attempt: int, result: Result, status_code: int, at: datetime
) -> bool | None:
    """Record the receiver's result. False: the lease had expired, or it was cancelled; None: unknown delivery."""
    row = tx.execute(_FIND, {"of_id": delivery_id, "of_endpoint": endpoint.id}).mappings().one_or_none()
    if row is None:
        return None
    claimed = ClaimedDelivery(**row, attempts=attempt, lease_until=row["due_at"], url=endpoint.url, body="")
    ended = FinishedAttempt(claimed, result, at, status_code=status_code)
    return settle_deliveries(tx, [ended]).get(delivery_id) is DeliveryState.WAITING


def _put_back(tx: Transaction, delivery: DueDelivery | ClaimedDelivery, due_at: datetime, **values: Any) -> None:
    """Undo an uncommitted claim."""
    values |= {"due_at": due_at, "attempts": _TABLE.attempts - 1}
    of_delivery = (_TABLE.run_id == delivery.run_id, _TABLE.id == delivery.id)
    tx.execute(deliveries.update().where(*of_delivery).values(values))


def _lease(
    tx: Transaction, due: Sequence[DueDelivery], now: datetime, lease_seconds: float, encryption: Encryption
) -> list[ClaimedDelivery]:
    """Claim these deliveries, with their secrets, and hand their stops over."""
    if not due:
        return []
    lease_until = now + timedelta(seconds=lease_seconds)
    tx.execute(_LEASE, {"ids": [delivery.id for delivery in due], "lease_until": lease_until})
    claims = []
    for delivery in due:
        try:
            secrets = endpoints.decrypt_signing_keys(delivery, delivery.endpoint_id, now, encryption)
        except UnreadableSecret as error:
            _put_back(tx, delivery, now + timedelta(seconds=UNREADABLE_PAUSE_SECONDS), last_error=str(error))
            continue
        claims.append(ClaimedDelivery(*delivery[:-4], lease_until=lease_until, secrets=secrets))
    receivers = {(claimed.run_id, claimed.stop_of): claimed.receiver for claimed in claims if claimed.stop_of}
    if not receivers:
        return claims
    may_go_out = hand_overs.hand_over(tx, receivers, now)
    held_back = [claimed for claimed in claims if claimed.stop_of and claimed.stop_of not in may_go_out]
    for claimed in held_back:
        _put_back(tx, claimed, now + timedelta(seconds=VETO_PAUSE_SECONDS))
    return [claimed for claimed in claims if claimed not in held_back]


_TABLE, _EARLIER = deliveries.c, deliveries.alias("earlier")
_NOW = sa.bindparam("now", type_=UtcTime)
_IS_ONE_OF = _TABLE.id.in_(sa.bindparam("ids", expanding=True))

# Inlined, not bound, so that a generic plan can use the partial index.
_WAITING: sa.ColumnElement[Any] = sa.literal_column("'waiting'")

# Not NOT EXISTS, which PostgreSQL may turn into a join with all waiting deliveries.
_HAS_ITS_TURN = (
    sa.select(_EARLIER.c.id)
    .where(
        _EARLIER.c.endpoint_id == _TABLE.endpoint_id,
        _EARLIER.c.run_id == _TABLE.run_id,
        _EARLIER.c.state == _WAITING,
        _EARLIER.c.id < _TABLE.id,
        _EARLIER.c.urgent | ~_TABLE.urgent,
        (_EARLIER.c.attempts > 0) | (_EARLIER.c.due_at <= _NOW),
    )
    .limit(1)
    .correlate(deliveries)
    .scalar_subquery()
    .is_(None)
)
_IS_DUE = sa.and_(_TABLE.endpoint_id == targets.c.id, _TABLE.state == _WAITING, _TABLE.due_at <= _NOW, _HAS_ITS_TURN)

# The decision whose stop a delivery hands over: people who read one in a chat cannot end the job.
_STOP_OF = sa.case(((targets.c.format == "standard") & events.c.type.in_(REQUEST_EVENTS), events.c.decision_id)).label(
    "stop_of"
)


def _select_due(dialect: str, source: sa.FromClause, *conditions: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """The due deliveries of the endpoints in a source, locked, of each endpoint the first `most`.

    The columns are those fields of `ClaimedDelivery` that are stored, and the four of `decrypt_signing_keys`.
    """
    names = ("run_id", "id", "event_id", "endpoint_id", "attempts", "due_at")
    first = sa.select(*(_TABLE[name] for name in names)).where(_IS_DUE).order_by(_TABLE.due_at, _TABLE.id).limit(_MOST)
    first = first.with_for_update(skip_locked=True, of=deliveries).correlate(targets)
    head: sa.FromClause = first.lateral("head")
    is_head: sa.ColumnElement[bool] = sa.true()
    if dialect == "sqlite":  # which lacks LATERAL
        head = deliveries.alias("head")
        is_head = head.c.id.in_(first.with_only_columns(_TABLE.id))
    of_event = (events.c.run_id == head.c.run_id) & (events.c.id == head.c.event_id)
    columns = [(head.c[name] + 1).label(name) if name == "attempts" else head.c[name] for name in names]
    columns += [targets.c.url, events.c.body, targets.c.format, targets.c.failures, _STOP_OF]
    secrets = (targets.c[name] for name in ("secret", "previous_secret", "previous_secret_until", "signing_key"))
    query = sa.select(*columns, *secrets).select_from(source.join(head, is_head).join(events, of_event))
    return query.where(*conditions).order_by(head.c.due_at, head.c.id)


def _select_queues() -> sa.CTE:
    """The endpoints with a waiting delivery, each found by one index lookup after the previous one."""
    key = _TABLE.endpoint_id
    lowest = sa.select(key).where(_TABLE.state == _WAITING).order_by(key).limit(1)
    queue = sa.select(lowest.subquery().c.endpoint_id).cte("queue", recursive=True)
    following = lowest.where(key > queue.c.endpoint_id).scalar_subquery()
    return queue.union_all(sa.select(following).where(queue.c.endpoint_id.is_not(None)))


_QUEUE = _select_queues()
_SERVED = sa.and_(
    targets.c.id == _QUEUE.c.endpoint_id,
    targets.c.enabled,
    targets.c.deleted_at.is_(None),
    sa.func.substr(targets.c.url, 1, len(PULL_PREFIX)) != PULL_PREFIX,
)
_SERVED_QUEUES = _QUEUE.join(targets, _SERVED)
_IS_CLOSED = targets.c.open_until.is_(None) | (targets.c.open_until <= _NOW)
_IS_BUSY = targets.c.id.in_(sa.bindparam("busy", expanding=True))
_MOST = sa.bindparam("most", type_=sa.Integer)

_DUE = {
    dialect: _select_due(dialect, _SERVED_QUEUES, _IS_CLOSED, ~_IS_BUSY).limit(sa.bindparam("limit"))
    for dialect in ("postgresql", "sqlite")
}
_DUE_OF_ENDPOINT = {
    dialect: _select_due(dialect, targets, targets.c.id == sa.bindparam("of_endpoint"))
    for dialect in ("postgresql", "sqlite")
}

# Not EXISTS, which PostgreSQL may turn into a join with all waiting deliveries.
_FIRST_DUE = sa.select(_TABLE.id).where(_IS_DUE).limit(1).correlate(targets).scalar_subquery()
_FIND_WITH_DUE = sa.select(targets.c.id).where(
    targets.c.id.in_(sa.bindparam("of_endpoints", expanding=True)), _FIRST_DUE.is_not(None)
)

_LEASED = {"due_at": sa.bindparam("lease_until", type_=UtcTime), "attempts": _TABLE.attempts + 1}
_LEASE = deliveries.update().where(_IS_ONE_OF).values(_LEASED)

_FIND = sa.select(_TABLE.run_id, _TABLE.id, _TABLE.event_id, _TABLE.endpoint_id, _TABLE.due_at).where(
    _TABLE.id == sa.bindparam("of_id"), _TABLE.endpoint_id == sa.bindparam("of_endpoint")
)
