"""Sends events again at an operator's request, and records the request in the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from evalstop_service.clock import rfc3339
from evalstop_service.domain.event_types import SUBSCRIBABLE
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.store import endpoints
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.queue import deliveries, outbox
from evalstop_service.store.queue.deliveries import Delivery
from evalstop_service.store.queue.outbox import Replay
from evalstop_service.webhooks.endpoints import record_endpoint_change, require_enabled

MAX_REPLAYED_EVENTS = 1000


def retry_delivery(database: Database, author: Author, delivery_id: UUID) -> Delivery:
    """Make a dead delivery due now; raises NotFound, and Conflict when it is not dead or its event no longer holds."""
    with database.transaction() as tx:
        dead = deliveries.load_delivery(tx, author.project_id, delivery_id)
        if not outbox.may_replay(tx, author.project_id, dead.event_id):
            raise _build_conflict(dead)
        endpoint = endpoints.find_endpoint(tx, author.project_id, dead.endpoint_id)
        if endpoint is not None:
            _require_wanted(endpoint, dead)
        revived = deliveries.retry_delivery(tx, author.project_id, delivery_id, author.at)
        delivery = deliveries.load_delivery(tx, author.project_id, delivery_id)
        if not revived:
            raise Conflict(
                f"the delivery is {delivery.state}; only a dead delivery to an endpoint that exists can be retried"
            )
        _record_delivery(tx, author, "delivery.retried", delivery)
        return delivery


def replay_delivery(database: Database, author: Author, delivery_id: UUID) -> Delivery:
    """Send the event of a delivery to its endpoint again, as a new delivery; raises NotFound and Conflict."""
    with database.transaction() as tx:
        earlier = deliveries.load_delivery(tx, author.project_id, delivery_id)
        _require_wanted(require_enabled(tx, author.project_id, earlier.endpoint_id), earlier)
        new_delivery_id = outbox.replay_event(tx, author.project_id, earlier.endpoint_id, earlier.event_id, author.at)
        if new_delivery_id is None:
            raise _build_conflict(earlier)
        _record_delivery(tx, author, "delivery.replayed", earlier)
        return deliveries.load_delivery(tx, author.project_id, new_delivery_id)


def replay_events(
    database: Database,
    author: Author,
    endpoint_id: UUID,
    *,
    since: datetime,
    until: datetime,
    types: Sequence[str] | None,
    after: UUID | None,
) -> Replay:
    """Send again the events of a period that the endpoint subscribes to, at most `MAX_REPLAYED_EVENTS`.

    Raises Invalid when the period ends before it begins, NotFound, and Conflict when the endpoint is disabled.
    """
    if until < since:
        raise Invalid(f"the period would end at {rfc3339(until)}, before it begins at {rfc3339(since)}")
    with database.transaction() as tx:
        endpoint = require_enabled(tx, author.project_id, endpoint_id)
        replayed = outbox.replay_range(
            tx,
            author.project_id,
            endpoint_id,
            since=since,
            until=until,
            types=_select_types(endpoint, types),
            after=after,
            limit=MAX_REPLAYED_EVENTS,
            now=author.at,
        )
        period: dict[str, str | int] = {
            "since": rfc3339(since),
            "until": rfc3339(until),
            "deliveries": len(replayed.deliveries),
        }
        record_endpoint_change(tx, author, "endpoint.replayed", endpoint, period)
        return replayed


def _select_types(endpoint: Endpoint, types: Sequence[str] | None) -> Sequence[str]:
    """The requested types (None: all) that the endpoint subscribes to."""
    requested = SUBSCRIBABLE if types is None or "*" in types else types
    return [event_type for event_type in requested if endpoint.wants(event_type)]


def _require_wanted(endpoint: Endpoint, delivery: Delivery) -> None:
    if not endpoint.wants(delivery.event_type):
        raise Conflict(f"the endpoint does not subscribe to {delivery.event_type}")


def _build_conflict(delivery: Delivery) -> Conflict:
    return Conflict(f"the {delivery.event_type} no longer holds: its decision or its run has since changed")


def _record_delivery(tx: Transaction, author: Author, action: str, delivery: Delivery) -> None:
    details = {"event_type": delivery.event_type, "endpoint_id": str(delivery.endpoint_id)}
    author.record(tx, action, f"delivery {delivery.id}", details)
