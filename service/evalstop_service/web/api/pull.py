"""Routes for receivers that fetch events because they cannot accept connections: claim and settle."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import datetime
from functools import partial
from typing import Annotated
from uuid import UUID

from fastapi import Request
from pydantic import Field

from evalstop_service.domain.fields import Body, Integral, Line
from evalstop_service.errors import Overloaded, require
from evalstop_service.store.database import read_now
from evalstop_service.store.endpoints import PULL_PREFIX, load_pull_endpoint
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import ClaimedDelivery
from evalstop_service.web.api.endpoints import EndpointWithSecret, Subscription, view_with_secret
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.schemas import Answer, EndpointId, Time
from evalstop_service.web.context import Admin, Caller, Context, Ctx, Db, Now, Report, authenticate_request
from evalstop_service.web.limits import hold_place, in_thread
from evalstop_service.web.problems import Problem, ProblemKind
from evalstop_service.webhooks import endpoints, retry
from evalstop_service.webhooks.links import add_url
from evalstop_service.webhooks.signature import sign_headers

router = create_router("webhooks", prefix=f"{API}/pull/endpoints")

_TOO_MANY = Problem(503, ProblemKind.OVERLOADED, "too many receivers are waiting", headers={"Retry-After": "10"})

POLL_SECONDS = 0.5
"""Pause between two looks for events: the longest delay that it adds to one."""


class PullEndpointIn(Subscription):
    """A new endpoint whose events are fetched."""

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="name of the receiver, unique in the project", examples=["login-node"]
    )


class ClaimIn(Body):
    """How long to wait for events, how many to claim, and for how long."""

    wait_seconds: float = Field(
        25.0,
        ge=0,
        le=60,
        description="the response comes when an event is due; without one after this time, or up to a fifth sooner",
    )
    limit: Annotated[int, Field(ge=1, le=100), Integral] = Field(10, description="maximum number of events")
    lease_seconds: float = Field(
        30.0,
        ge=5,
        le=leases.MAX_PULL_LEASE_SECONDS,
        description="events that are not settled by then are given out again",
    )


class PulledEvent(Answer):
    """An event, signed like a webhook: verify `body` with `headers` before you trust it."""

    delivery_id: UUID = Field(description="pass it to settle the event")
    attempt: int = Field(description="how often it was given out; settling applies only to this attempt")
    lease_until: Time = Field(description="if it is not settled by then, it is given out again")
    headers: dict[str, str] = Field(description="id, time and signature, as in a webhook")
    body: str = Field(description="exactly the text that is signed")


class PulledEvents(Answer):
    """Due events, oldest first; empty if none became due in time."""

    events: list[PulledEvent] = Field(description="due events, oldest first")


class SettleIn(Body):
    """The result of a claimed event."""

    delivery_id: UUID = Field(strict=False, description="`delivery_id` of the claimed event")
    attempt: Annotated[int, Field(ge=1, le=2**31 - 1), Integral] = Field(description="`attempt` of the claimed event")
    status: Annotated[int, Field(ge=200, le=599), Integral] = Field(
        description="an HTTP status: 2xx accepted; 400, 410, 413, 415, 422 rejected for good; others retry later"
    )
    error: Line = Field("", description="what went wrong, for people")


class Settlement(Answer):
    """`settled` is false when the lease had expired or the delivery was cancelled: nothing was changed."""

    settled: bool = Field(description="false: the lease had expired, or the delivery was cancelled")


@router.post("", status_code=201)
def create_pull_endpoint(body: PullEndpointIn, caller: Admin, context: Ctx, now: Now) -> EndpointWithSecret:
    """Create an endpoint whose receiver fetches its events; change, rotate and delete it like any other endpoint."""
    url, event_types = PULL_PREFIX + body.name, body.list_event_types("receiver")
    endpoint = endpoints.create_endpoint(context.database, caller.author(now), url, event_types, context.encryption)
    return view_with_secret(endpoint, context.encryption)


@router.post("/{endpoint_id}/claim")
async def claim_events(
    endpoint_id: EndpointId, body: ClaimIn, caller: Report, context: Ctx, request: Request
) -> PulledEvents:
    """Claim due events, or wait for one."""
    caller.require_endpoint(endpoint_id)
    try:
        hold_place(context.limits.pulls)
    except Overloaded:
        raise _TOO_MANY from None
    # Receivers that began together, as after a restart, would otherwise all return at the same time, again and again.
    deadline = time.monotonic() + body.wait_seconds * random.uniform(0.8, 1.0)
    claim = in_thread(partial(_claim_deliveries, context, caller, endpoint_id, body))
    claimed = await claim()
    # The body was read, so that the next message says that the receiver has disconnected: events must not be leased to
    # it then.
    disconnected = asyncio.ensure_future(request.receive())
    try:
        while not claimed and not context.shutdown.is_set() and (seconds := deadline - time.monotonic()) > 0:
            await asyncio.wait([disconnected], timeout=min(seconds, POLL_SECONDS))
            if disconnected.done():
                break
            await authenticate_request(request)  # its key may have been revoked meanwhile
            claimed = await claim()
    finally:
        disconnected.cancel()
    return PulledEvents(events=[_sign_event(delivery, context.public_url, context.clock()) for delivery in claimed])


@router.post("/{endpoint_id}/settle")
def settle_event(endpoint_id: EndpointId, body: SettleIn, caller: Report, database: Db, now: Now) -> Settlement:
    """Report the result of a claimed event."""
    caller.require_endpoint(endpoint_id)
    with database.transaction() as tx:
        endpoint = load_pull_endpoint(tx, caller.project_id, endpoint_id)
        at = read_now(tx, lambda: now)
        error = f"HTTP {body.status}: {body.error}" if body.status >= 300 and body.error else None
        result = retry.judge_answer(retry.Answer(body.status, error, 0.0), body.attempt, at, 1.0, retry.PULL_BACKOFF)
        settled = leases.settle_pulled(tx, endpoint, body.delivery_id, body.attempt, result, body.status, at)
        if settled:
            details = {"status": body.status, "endpoint": str(endpoint_id)}
            caller.author(now).record(tx, "delivery.settled", f"delivery {body.delivery_id}", details)
    return Settlement(settled=require(settled, f"delivery {body.delivery_id} to this endpoint"))


def _claim_deliveries(context: Context, caller: Caller, endpoint_id: UUID, body: ClaimIn) -> list[ClaimedDelivery]:
    with context.database.reading() as tx:
        endpoint = load_pull_endpoint(tx, caller.project_id, endpoint_id)
        now = read_now(tx, context.clock)
        if not endpoint.enabled or not leases.find_endpoints_with_due(tx, [endpoint_id], now):
            return []
    with context.database.transaction() as tx:
        now = read_now(tx, context.clock)
        claimed = leases.pull_deliveries(tx, endpoint, now, body.lease_seconds, body.limit, context.encryption)
        if claimed:
            details = {"deliveries": [str(delivery.id) for delivery in claimed]}
            caller.author(context.clock()).record(tx, "delivery.claimed", f"endpoint {endpoint_id}", details)
        return claimed


def _sign_event(claimed: ClaimedDelivery, public_url: str | None, now: datetime) -> PulledEvent:
    body = add_url(claimed.body, public_url, claimed.run_id)
    headers = sign_headers(claimed.secrets, str(claimed.event_id), int(now.timestamp()), body.encode())
    return PulledEvent(
        delivery_id=claimed.id, attempt=claimed.attempts, lease_until=claimed.lease_until, headers=headers, body=body
    )
