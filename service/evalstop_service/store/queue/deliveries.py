"""Deliveries for operators: find, list with attempts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.event_types import PENDING_EVENTS, EventType
from evalstop_service.domain.fields import doc
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.errors import require
from evalstop_service.store.database import Transaction, find_one, find_page, match_given
from evalstop_service.store.tables import deliveries, delivery_attempts, endpoints, events
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.webhooks import DeliveryAttempt as DeliveryAttempt


@dataclass(frozen=True)
class Delivery:
    """One event on its way to one endpoint."""

    id: Annotated[UUID, doc("id of the delivery")]
    run_id: Annotated[UUID, doc("the run that the event is about")]
    event_id: Annotated[UUID, doc("the `webhook-id`, with which receivers drop repeats")]
    event_type: Annotated[str, doc("what happened")]
    decision_id: Annotated[UUID | None, doc("the decision that the event is about; null: none")]
    endpoint_id: Annotated[UUID, doc("the endpoint that it goes to")]
    url: Annotated[str, doc("current URL of the endpoint")]
    state: Annotated[DeliveryState, doc("waiting, delivered, dead or cancelled")]
    attempts: Annotated[int, doc("number of attempts")]
    due_at: Annotated[datetime, doc("it is not sent before this time")]
    last_error: Annotated[str | None, doc("why the last attempt failed, or why it was cancelled; null: neither")]
    created_at: Annotated[datetime, doc("when the event was created")]
    settled_at: Annotated[datetime | None, doc("when it was delivered, given up or cancelled; null: not yet")]


@dataclass(frozen=True)
class DeliveryContent:
    """The event that a delivery carries, and the format of its endpoint."""

    body: str
    format: str


class Announcement(NamedTuple):
    """The delivery of a message that told people of a pending stop."""

    project_id: UUID
    endpoint_id: UUID
    event_id: UUID
    decision_id: UUID


def find_announcement(tx: Transaction, delivery_id: UUID) -> Announcement | None:
    """The delivery with this id, if it announces a pending stop."""
    query = (
        sa.select(events.c.project_id, deliveries.c.endpoint_id, events.c.id, events.c.decision_id)
        .join(deliveries, (deliveries.c.run_id == events.c.run_id) & (deliveries.c.event_id == events.c.id))
        .where(deliveries.c.id == delivery_id, events.c.type.in_(PENDING_EVENTS))
    )
    row = tx.execute(query).one_or_none()
    return None if row is None else Announcement(*row)


def find_newest_announcement(tx: Transaction, run_id: UUID, decision_id: UUID) -> UUID | None:
    """The event that announced the latest veto window of a decision."""
    of_decision = (events.c.run_id == run_id, events.c.decision_id == decision_id, events.c.type.in_(PENDING_EVENTS))
    return tx.execute(sa.select(events.c.id).where(*of_decision).order_by(events.c.id.desc()).limit(1)).scalar()


def load_delivery(tx: Transaction, project_id: UUID, delivery_id: UUID) -> Delivery:
    """The project's delivery with this id; raises NotFound."""
    delivery = find_one(tx, Delivery, _of(project_id).where(deliveries.c.id == delivery_id))
    return require(delivery, f"delivery {delivery_id} in this project")


def list_deliveries(
    tx: Transaction,
    project_id: UUID,
    *,
    state: DeliveryState | None = None,
    endpoint_id: UUID | None = None,
    run_id: UUID | None = None,
    event_type: EventType | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[Delivery]:
    """A project's deliveries, newest first, older than the delivery `before`.

    `since`, `until`: created at or after, and before.
    """
    table = deliveries.c
    exact = {table.state: state, table.endpoint_id: endpoint_id, table.run_id: run_id, events.c.type: event_type}
    created = match_given(exact, since={table.created_at: since}, before={table.created_at: until})
    return find_page(tx, Delivery, _of(project_id).where(*created), table.id, before, limit)


def list_attempts(tx: Transaction, delivery: Delivery) -> list[DeliveryAttempt]:
    """All settled attempts of a delivery, oldest first."""
    table = delivery_attempts.c
    query = sa.select(*columns_of(delivery_attempts, DeliveryAttempt))
    query = query.where(table.run_id == delivery.run_id, table.delivery_id == delivery.id)
    return [DeliveryAttempt(*row) for row in tx.execute(query.order_by(table.number))]


def get_content(tx: Transaction, delivery: Delivery) -> DeliveryContent:
    """The event that a delivery carries, and the format of its endpoint."""
    query = _of_delivery(sa.select(events.c.body, endpoints.c.format)).where(
        deliveries.c.run_id == delivery.run_id, deliveries.c.id == delivery.id
    )
    return DeliveryContent(*tx.execute(query).one())


def _of(project_id: UUID) -> sa.Select[Any]:
    columns = (
        *columns_of(deliveries, Delivery),
        events.c.type.label("event_type"),
        events.c.decision_id,
        endpoints.c.url,
    )
    return _of_delivery(sa.select(*columns)).where(endpoints.c.project_id == project_id)


def _of_delivery(query: sa.Select[Any]) -> sa.Select[Any]:
    """Join the event and the endpoint of each delivery."""
    of_event = (events.c.run_id == deliveries.c.run_id) & (events.c.id == deliveries.c.event_id)
    return (
        query.select_from(deliveries).join(events, of_event).join(endpoints, endpoints.c.id == deliveries.c.endpoint_id)
    )
