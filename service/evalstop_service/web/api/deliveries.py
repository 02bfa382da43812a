"""Routes of deliveries: list, read with request and attempts, retry."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field

from evalstop_service.errors import NotFound
from evalstop_service.rules.statuses import DeliveryState
from evalstop_service.store.database import Transaction
from evalstop_service.store.queue import deliveries
from evalstop_service.store.queue.deliveries import Delivery
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import make_cursor
from evalstop_service.web.api.schemas import Answer, Page, Time
from evalstop_service.web.context import Ctx, Db, Now, Operate, Read
from evalstop_service.webhooks import resend
from evalstop_service.webhooks.channels import render_body
from evalstop_service.webhooks.links import add_url

router = APIRouter(prefix="/deliveries", tags=["webhooks"], route_class=JsonRoute)


class AttemptOut(Answer):
    """One attempt. A missing number belongs to a worker that died."""

    number: int
    at: Time
    duration_ms: float
    status_code: int | None
    error: str | None
    url: str | None = Field(description="where it was sent")
    answer: str | None = Field(description="the start of the response")


class DeliveryOut(Answer):
    """One event on its way to one endpoint."""

    id: UUID
    run_id: UUID
    event_id: UUID
    event_type: str
    decision_id: UUID | None
    endpoint_id: UUID
    url: str
    state: DeliveryState
    attempts: int
    due_at: Time
    last_error: str | None
    created_at: Time
    settled_at: Time | None
    log: list[AttemptOut]


class RequestOut(Answer):
    """The request. Each attempt adds `webhook-timestamp` and `webhook-signature`, which are not stored."""

    method: Literal["POST"] = "POST"
    url: str
    headers: dict[str, str]
    body: str


class DeliveryDetail(DeliveryOut):
    """A delivery with its request."""

    request: RequestOut


class DeliveryPage(Page):
    """Deliveries, newest first."""

    items: list[DeliveryOut]


@router.get("")
def list_deliveries(
    caller: Read,
    database: Db,
    state: DeliveryState | None = None,
    endpoint_id: UUID | None = None,
    run_id: UUID | None = None,
    cursor: UUID | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> DeliveryPage:
    """The project's deliveries, newest first."""
    with database.reading() as tx:
        listed = deliveries.list_deliveries(
            tx,
            caller.project_id,
            state=state,
            endpoint_id=endpoint_id,
            run_id=run_id,
            before=cursor,
            limit=limit,
        )
        items = [view_delivery(tx, delivery) for delivery in listed]
    return DeliveryPage(items=items, next_cursor=make_cursor(listed, limit))


@router.get("/{delivery_id}")
def get_delivery(delivery_id: UUID, caller: Read, context: Ctx, database: Db) -> DeliveryDetail:
    """A delivery with its request and every attempt at it."""
    with database.reading() as tx:
        delivery = deliveries.find_delivery(tx, caller.project_id, delivery_id)
        if delivery is None:
            raise NotFound(f"there is no delivery {delivery_id} in this project")
        content = deliveries.get_content(tx, delivery)
        shown = view_delivery(tx, delivery)
    request = RequestOut(
        url=delivery.url,
        headers={"content-type": "application/json", "webhook-id": str(delivery.event_id)},
        body=render_body(content.format, add_url(content.body, context.public_url, delivery.run_id)),
    )
    return DeliveryDetail.model_validate(vars(shown) | {"request": request})


@router.post("/{delivery_id}/retry")
def retry_delivery(delivery_id: UUID, caller: Operate, database: Db, now: Now) -> DeliveryOut:
    """Retry a dead delivery now."""
    delivery = resend.retry_delivery(database, caller.author(now), delivery_id)
    with database.reading() as tx:
        return view_delivery(tx, delivery)


def view_delivery(tx: Transaction, delivery: Delivery) -> DeliveryOut:
    """A delivery with all attempts at it."""
    return DeliveryOut.model_validate(vars(delivery) | {"log": deliveries.list_attempts(tx, delivery)})
