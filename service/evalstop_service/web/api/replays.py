"""Routes that send events on request: replays of a period or of one event, and tests of an endpoint."""

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
    """Which events to send again: those created from `since` to before `until`."""

    since: Time = Field(description="the time of the first event")
    until: Time | None = Field(None, description="null: up to now")
    types: EventTypes | None = Field(
        None, description="of the types that the endpoint subscribes to; null: all of them"
    )
    after: Annotated[UUID, Field(strict=False)] | None = Field(
        None, description="`next_after` of the previous response, to continue"
    )


class ReplayOut(Answer):
    """The number of new deliveries; `next_after` means that there may be more events."""

    replayed: int = Field(description="number of new deliveries")
    passed_over: int = Field(
        description="skipped: stops that no longer hold, and resumes of jobs that are to be stopped again"
    )
    next_after: UUID | None = Field(description="pass it as `after` to continue; null: there are no more")


class TestOut(Answer):
    """An endpoint's answer to a test event; `delivered`: a 2xx status."""

    event_id: UUID = Field(description="the `webhook-id` of the test")
    url: str = Field(description="where it was sent")
    delivered: bool = Field(description="whether the answer was 2xx")
    status_code: int | None = Field(description="HTTP status of the answer; null: no answer")
    error: str | None = Field(description="why it was not delivered; null: it was")
    answer: str | None = Field(description="the start of the response")
    duration_ms: float = Field(description="from connecting to the answer, in milliseconds")


@router.post("/endpoints/{endpoint_id}/replay")
def replay_events(endpoint_id: EndpointId, body: ReplayIn, caller: Operate, context: Ctx, now: Now) -> ReplayOut:
    """Send events again, with the same ids, whether or not they were delivered; at most 1,000, oldest first."""
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
    """Send a signed `endpoint.test` event now and return the endpoint's answer; it is not a delivery and is not
    retried."""
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
