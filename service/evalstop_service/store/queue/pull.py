"""Pull deliveries: the receiver itself claims what waits for its pull endpoint, and settles it.

A pull endpoint has the URL `pull:<name>`. Workers skip its deliveries; everything else is as for any delivery: the
lease, the attempt number that identifies it, the states.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.errors import NotFound
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints
from evalstop_service.store.database import Transaction
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.queue import leases, queues
from evalstop_service.store.queue.attempts import ClaimedDelivery, FinishedAttempt, Result
from evalstop_service.store.tables import UtcTime, deliveries, events

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


def is_any_due(tx: Transaction, endpoint_id: UUID, now: datetime) -> bool:
    """Whether anything waits for the endpoint. This only reads, so that long polls do not take the write lock."""
    return tx.execute(sa.select(sa.exists().where(_is_due(endpoint_id, now)))).scalar_one()


def claim_deliveries(
    tx: Transaction,
    endpoint: Endpoint,
    now: datetime,
    lease_seconds: float,
    limit: int,
    encryption: Encryption = endpoints.UNENCRYPTED,
) -> list[ClaimedDelivery]:
    """Claim up to `limit` deliveries, longest due first, for `lease_seconds`; concurrent claims get different ones.

    Raises UnreadableSecret when no configured key decrypts the endpoint's secrets.
    """
    table = deliveries.c
    query = (
        sa.select(table.run_id, table.id, table.event_id, table.attempts, table.due_at, events.c.body)
        .join(events, (events.c.run_id == table.run_id) & (events.c.id == table.event_id))
        .where(_is_due(endpoint.id, now))
        .order_by(table.due_at, table.id)
        .limit(limit)
        .with_for_update(skip_locked=True, of=deliveries)
    )
    lease_until = now + timedelta(seconds=lease_seconds)
    valid = endpoints.select_valid_secrets(
        endpoint.secret, endpoint.previous_secret, endpoint.previous_secret_until, endpoint.signing_key, now
    )
    secrets = tuple(encryption.decrypt(stored, endpoint.id) for stored in valid)
    claimed = [
        ClaimedDelivery(
            run_id=row.run_id,
            id=row.id,
            event_id=row.event_id,
            endpoint_id=endpoint.id,
            attempts=row.attempts + 1,
            due_at=row.due_at,
            lease_until=lease_until,
            url=endpoint.url,
            secrets=secrets,
            body=row.body,
        )
        for row in tx.execute(query)
    ]
    for delivery in claimed:
        lease = sa.update(deliveries).where(table.run_id == delivery.run_id, table.id == delivery.id)
        tx.execute(lease.values(due_at=lease_until, attempts=delivery.attempts))
    return claimed


def settle_delivery(
    tx: Transaction, endpoint: Endpoint, delivery_id: UUID, attempt: int, result: Result, status_code: int, at: datetime
) -> bool | None:
    """Record the receiver's result. False: the lease had expired, or it was cancelled; None: unknown delivery."""
    query = sa.select(deliveries.c.run_id, deliveries.c.event_id, deliveries.c.due_at)
    row = tx.execute(query.where(deliveries.c.id == delivery_id, deliveries.c.endpoint_id == endpoint.id)).one_or_none()
    if row is None:
        return None
    claimed = ClaimedDelivery(
        run_id=row.run_id,
        id=delivery_id,
        event_id=row.event_id,
        endpoint_id=endpoint.id,
        attempts=attempt,
        due_at=row.due_at,
        lease_until=row.due_at,
        url=endpoint.url,
        secrets=(),
        body="",
    )
    return (
        delivery_id
        in leases.settle_deliveries(tx, [FinishedAttempt(claimed, result, at, status_code=status_code)]).still_held
    )


def _is_due(endpoint_id: UUID, now: datetime) -> sa.ColumnElement[bool]:
    # The state is inlined, not bound, so that the partial index is used.
    waiting = deliveries.c.state == sa.literal_column("'waiting'")
    turn = sa.text(queues.HAS_ITS_TURN.format(now=":now")).bindparams(sa.bindparam("now", now, UtcTime))
    return sa.and_(waiting, deliveries.c.endpoint_id == endpoint_id, deliveries.c.due_at <= now, turn)
