"""Sending by hand: events once more, of a time or one at a time, and a test of an endpoint."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from evalstop_service.web.api.deliveries import DeliveryOut, view_delivery
from evalstop_service.web.api.endpoints import EventTypes
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.schemas import Answer, Body, DeliveryId, EndpointId, Time
from evalstop_service.web.context import Ctx, Db, Now, Operate
from evalstop_service.webhooks import resend
from evalstop_service.webhooks.endpoint_test import send_test_event

router = APIRouter(tags=["webhooks"], route_class=JsonRoute)


class ReplayIn(Body):
    """Which events to send once more: those made from `since` to before `until`."""

    since: Time = Field(description="the time of the first event")
    until: Time | None = Field(None, description="null: up to now")
    types: EventTypes | None = Field(
        None, description="null: all that the endpoint subscribes to; it is sent no others"
    )
    after: Annotated[UUID, Field(strict=False)] | None = Field(
        None, description="`next_after` of the answer before, to go on"
    )


class ReplayOut(Answer):
    """How many deliveries were made; with `next_after` there may be more events, to be asked for with it."""

    replayed: int = Field(description="deliveries that were made")
    passed_over: int = Field(description="stops that no longer hold, and stops taken back that are wanted again")
    next_after: UUID | None = Field(description="pass it as `after`, as there may be more; null: there are none")


class TestOut(Answer):
    """What an endpoint answered to a test; `delivered`: with 2xx."""

    event_id: UUID = Field(description="the `webhook-id` of the test")
    url: str = Field(description="where it was sent")
    delivered: bool = Field(description="whether it was answered with 2xx")
    status_code: int | None = Field(description="of the answer; null: there was none")
    error: str | None = Field(description="why it did not arrive; null: it did")
    answer: str | None = Field(description="the start of what came back")
    duration_ms: float = Field(description="from connecting to the answer, in milliseconds")


@router.post("/endpoints/{endpoint_id}/replay")
def replay_events(endpoint_id: EndpointId, body: ReplayIn, caller: Operate, context: Ctx, now: Now) -> ReplayOut:
    """Send events again, under their ids, whatever became of them; at most 1,000, oldest first."""
    context.shares.spend_costly(caller.sender)
    replayed = resend.replay_events(
        context.database,
        caller.author(now),
        endpoint_id,
        since=body.since,
        until=body.until or now,
        types=body.types,
        after=body.after,
    )
    return ReplayOut(replayed=len(replayed.deliveries), passed_over=replayed.passed_over, next_after=replayed.last)


@router.post("/deliveries/{delivery_id}/replay", status_code=201)
def replay_delivery(delivery_id: DeliveryId, caller: Operate, database: Db, now: Now) -> DeliveryOut:
    """Send the event of a delivery to its endpoint again, as a new delivery."""
    delivery = resend.replay_delivery(database, caller.author(now), delivery_id)
    with database.reading() as tx:
        return view_delivery(tx, delivery)


@router.post("/endpoints/{endpoint_id}/test")
def test_endpoint(endpoint_id: EndpointId, caller: Operate, context: Ctx, now: Now) -> TestOut:
    """Send a signed `endpoint.test` now and return the endpoint's answer; it is not a delivery and is not retried."""
    context.shares.spend_costly(caller.sender)
    tested = send_test_event(
        context.database,
        caller.project_id,
        endpoint_id,
        address_policy=context.address_policy,
        encryption=context.encryption,
        timeout_seconds=context.delivery_timeout_seconds,
        mail=context.mail,
        now=now,
    )
    return TestOut(
        event_id=tested.event_id,
        url=tested.url,
        delivered=tested.delivered,
        status_code=tested.answer.status_code,
        error=tested.answer.error,
        answer=tested.answer.excerpt,
        duration_ms=tested.answer.duration_ms,
    )
