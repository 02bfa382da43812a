"""Routes of deliveries: list, read with request and attempts, replay."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from fastapi import Query
from pydantic import Field

from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store.database import Transaction
from evalstop_service.store.queue import deliveries
from evalstop_service.store.queue.deliveries import Delivery, DeliveryAttempt
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.list_filters import CreatedQuery
from evalstop_service.web.api.schemas import Answer, DeliveryId, Page, answers
from evalstop_service.web.context import Ctx, Db, Now, Operate, Read
from evalstop_service.webhooks import resend
from evalstop_service.webhooks.channels import render_body
from evalstop_service.webhooks.links import add_url

router = create_router("webhooks", prefix=f"{API}/deliveries")


@answers(DeliveryAttempt)
class AttemptOut(Answer):
    """One attempt. A number is missing if a worker died during that attempt."""


@answers(Delivery)
class DeliveryOut(Answer):
    """One event on its way to one endpoint."""

    log: list[AttemptOut] = Field(description="every attempt, oldest first")


class RequestOut(Answer):
    """The request. Each attempt adds `webhook-timestamp` and `webhook-signature`, which are not stored."""

    method: Literal["POST"] = Field("POST", description="HTTP method")
    url: str = Field(description="where it goes")
    headers: dict[str, str] = Field(description="headers that are the same in each attempt")
    body: str = Field(description="JSON in the format of the endpoint")


class DeliveryDetail(DeliveryOut):
    """A delivery with its request."""

    request: RequestOut = Field(description="what an attempt sends")


class DeliveryQuery(CreatedQuery):
    """Which deliveries to list, and which page."""

    state: DeliveryState | None = Field(None, description="deliveries in this state")
    endpoint_id: UUID | None = Field(None, description="deliveries to this endpoint")
    run_id: UUID | None = Field(None, description="deliveries of events about this run")
    event_type: EventType | None = Field(None, description="deliveries of events of this type")


@router.get("")
def list_deliveries(caller: Read, database: Db, query: Annotated[DeliveryQuery, Query()]) -> Page[DeliveryOut]:
    """The project's deliveries, newest first."""
    with database.reading() as tx:
        listed = deliveries.list_deliveries(tx, caller.project_id, **query.to_arguments())
        return Page[DeliveryOut].of([view_delivery(tx, delivery) for delivery in listed], query.limit)


@router.get("/{delivery_id}")
def get_delivery(delivery_id: DeliveryId, caller: Read, context: Ctx, database: Db) -> DeliveryDetail:
    """A delivery with its request and every attempt."""
    with database.reading() as tx:
        delivery = deliveries.load_delivery(tx, caller.project_id, delivery_id)
        content = deliveries.get_content(tx, delivery)
        document = view_delivery(tx, delivery)
    request = RequestOut(
        url=delivery.url,
        headers={"content-type": "application/json", "webhook-id": str(delivery.event_id)},
        body=render_body(content.format, add_url(content.body, context.public_url, delivery.run_id)),
    )
    return DeliveryDetail.model_validate(vars(document) | {"request": request})


@router.post("/{delivery_id}/replay", status_code=201)
def replay_delivery(delivery_id: DeliveryId, caller: Operate, database: Db, now: Now) -> DeliveryOut:
    """Send the event of a delivery to its endpoint again, as a new delivery."""
    delivery = resend.replay_delivery(database, caller.author(now), delivery_id)
    with database.reading() as tx:
        return view_delivery(tx, delivery)


def view_delivery(tx: Transaction, delivery: Delivery) -> DeliveryOut:
    """A delivery with all its attempts."""
    return DeliveryOut.model_validate(vars(delivery) | {"log": deliveries.list_attempts(tx, delivery)})
