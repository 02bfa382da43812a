"""Pull deliveries: the receiver itself claims what waits for its pull endpoint, and settles it.

A pull endpoint has the URL `pull:<name>`. Workers skip its deliveries; everything else is as for any delivery: the
lease, the attempt number that identifies it, the states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.event_types import REQUEST_EVENTS
from evalstop_service.errors import NotFound
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints
from evalstop_service.store.database import Transaction
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.queue import leases, queues
from evalstop_service.store.queue.attempts import ClaimedDelivery, FinishedAttempt, Result
from evalstop_service.store.tables import UtcTime, deliveries, events
from evalstop_service.store.tables import endpoints as targets

PREFIX = "pull:"

MAX_LEASE_SECONDS = 600.0
"""The longest lease that a receiver can ask for."""


def add_pull_endpoint(
    tx: Transaction,
    project_id: UUID,
    *,
    name: str,
    event_types: Iterable[str],
    now: datetime,
    encryption: Encryption = endpoints.UNENCRYPTED,
) -> Endpoint:
    """Create a pull endpoint with its own secret."""
    return endpoints.add_endpoint(
        tx, project_id, url=PREFIX + name, event_types=event_types, now=now, encryption=encryption
    )


def load_pull_endpoint(tx: Transaction, project_id: UUID, endpoint_id: UUID) -> Endpoint:
    """The project's pull endpoint with this id; raises NotFound, also for a push endpoint."""
    endpoint = endpoints.find_endpoint(tx, project_id, endpoint_id)
    if endpoint is None or not endpoint.url.startswith(PREFIX):
        raise NotFound(f"there is no pull endpoint {endpoint_id} in this project")
    return endpoint


def find_endpoints_with_due(tx: Transaction, endpoint_ids: Collection[UUID], now: datetime) -> set[UUID]:
    """Those of these endpoints that have something to claim. This only reads, so that long polls do not take the write
    lock."""
    return set(tx.execute(_FIND_WITH_DUE, {"of_endpoints": list(endpoint_ids), "now": now}).scalars())


def claim_deliveries(
    tx: Transaction,
    endpoint: Endpoint,
    now: datetime,
    lease_seconds: float,
    limit: int,
    encryption: Encryption = endpoints.UNENCRYPTED,
) -> list[ClaimedDelivery]:
    """Claim up to `limit` deliveries, longest due first, for `lease_seconds`, and hand the stops among them over;
    concurrent claims get different ones.

    Raises UnreadableSecret when no configured key decrypts the endpoint's secrets.
    """
    lease_until = now + timedelta(seconds=lease_seconds)
    valid = endpoints.select_valid_secrets(
        endpoint.secret, endpoint.previous_secret, endpoint.previous_secret_until, endpoint.signing_key, now
    )
    secrets = tuple(encryption.decrypt(stored, endpoint.id) for stored in valid)
    claimed = [
        ClaimedDelivery(**row, lease_until=lease_until, url=endpoint.url, secrets=secrets)
        for row in tx.execute(_LOCK_DUE, {"of_endpoint": endpoint.id, "now": now, "most": limit}).mappings()
    ]
    for delivery in claimed:
        row = {"of_run": delivery.run_id, "of_id": delivery.id}
        tx.execute(_LEASE, row | {"due_at": lease_until, "attempts": delivery.attempts})
    return leases.hand_over(tx, claimed, now)


def settle_delivery(
    tx: Transaction, endpoint: Endpoint, delivery_id: UUID, attempt: int, result: Result, status_code: int, at: datetime
) -> bool | None:
    """Record the receiver's result. False: the lease had expired, or it was cancelled; None: unknown delivery."""
    row = tx.execute(_FIND, {"of_id": delivery_id, "of_endpoint": endpoint.id}).mappings().one_or_none()
    if row is None:
        return None
    claimed = ClaimedDelivery(**row, attempts=attempt, lease_until=row["due_at"], url=endpoint.url, secrets=(), body="")
    ended = FinishedAttempt(claimed, result, at, status_code=status_code)
    return delivery_id in leases.settle_deliveries(tx, [ended]).still_held


# The statements of a claim are built once: SQLAlchemy takes longer to build one than to execute it.
_TABLE = deliveries.c

_STOP_OF = sa.case((events.c.type.in_(REQUEST_EVENTS), events.c.decision_id))

_KEY = (_TABLE.run_id, _TABLE.id, _TABLE.event_id, _TABLE.endpoint_id, _TABLE.due_at)

_DUE = sa.and_(
    _TABLE.state == sa.literal_column("'waiting'"),  # inlined, not bound, so that the partial index is used
    _TABLE.due_at <= sa.bindparam("now"),
    sa.text(queues.HAS_ITS_TURN.format(now=":now")).bindparams(sa.bindparam("now", type_=UtcTime)),
)

# Not EXISTS, which PostgreSQL may turn into a join with all waiting deliveries.
_FIRST_DUE = sa.select(_TABLE.id).where(_TABLE.endpoint_id == targets.c.id, _DUE).limit(1).scalar_subquery()

_FIND_WITH_DUE = sa.select(targets.c.id).where(
    targets.c.id.in_(sa.bindparam("of_endpoints", expanding=True)), _FIRST_DUE.is_not(None)
)

_LOCK_DUE = (
    sa.select(*_KEY, (_TABLE.attempts + 1).label("attempts"), events.c.body, _STOP_OF.label("stop_of"))
    .join(events, (events.c.run_id == _TABLE.run_id) & (events.c.id == _TABLE.event_id))
    .where(_TABLE.endpoint_id == sa.bindparam("of_endpoint"), _DUE)
    .order_by(_TABLE.due_at, _TABLE.id)
    .limit(sa.bindparam("most"))
    .with_for_update(skip_locked=True, of=deliveries)
)

_LEASE = sa.update(deliveries).where(_TABLE.run_id == sa.bindparam("of_run"), _TABLE.id == sa.bindparam("of_id"))

_FIND = sa.select(*_KEY).where(_TABLE.id == sa.bindparam("of_id"), _TABLE.endpoint_id == sa.bindparam("of_endpoint"))
