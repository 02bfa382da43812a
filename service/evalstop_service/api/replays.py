"""Sending by hand: events once more, of a time or one at a time, and a test of an endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from evalstop_service import slack
from evalstop_service.api.bodies import JsonRoute
from evalstop_service.api.context import Db, Now, Operate, Secrets
from evalstop_service.api.deliveries import DeliveryOut, delivery_out
from evalstop_service.api.endpoints import EventTypes
from evalstop_service.api.schemas import Answer, Body, Time
from evalstop_service.clock import rfc3339
from evalstop_service.errors import Conflict, NotFound
from evalstop_service.event_schemas import TEST
from evalstop_service.store import deliveries, endpoints, projects, pull, replays
from evalstop_service.store.database import Transaction
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.ids import new_id

MOST_REPLAYED = 1000


@dataclass(frozen=True)
class Came:
    """What came back for one attempt."""

    status_code: int | None
    error: str | None
    answer: str | None
    duration_ms: float


Send = Callable[[str, Sequence[str], str, datetime, bytes], Came]
"""Sends a body, signed, now: URL, secrets, webhook-id, time, body."""


class ReplayIn(Body):
    """Which events to send once more: those made from `since` to before `until`."""

    since: Time
    until: Time | None = Field(None, description="null: up to now")
    types: EventTypes | None = Field(None, description="null: all")
    after: Annotated[UUID, Field(strict=False)] | None = Field(
        None, description="`next_after` of the answer before, to go on"
    )


class ReplayOut(Answer):
    """How many deliveries were made; with `next_after` there may be more events, to be asked for with it."""

    replayed: int
    passed_over: int = Field(description="stops that no longer hold, and stops taken back that are wanted again")
    next_after: UUID | None


class TrialOut(Answer):
    """What an endpoint answered to a test; `delivered`: with 2xx."""

    event_id: UUID
    url: str
    delivered: bool
    status_code: int | None
    error: str | None
    answer: str | None = Field(description="the start of what came back")
    duration_ms: float


def routes(send: Send) -> APIRouter:
    """The routes, with what sends a test."""
    router = APIRouter(tags=["webhooks"], route_class=JsonRoute)

    @router.post("/endpoints/{endpoint_id}/replay")
    def replay_events(endpoint_id: UUID, body: ReplayIn, caller: Operate, database: Db, now: Now) -> ReplayOut:
        """Send events once more, under their ids, whatever became of them; at most 1,000, oldest first."""
        with database.transaction() as tx:
            _in_service(tx, caller.project_id, endpoint_id)
            done = replays.of_range(
                tx,
                caller.project_id,
                endpoint_id,
                since=body.since,
                until=body.until or now,
                types=None if body.types is None or "*" in body.types else body.types,
                after=body.after,
                limit=MOST_REPLAYED,
                now=now,
            )
        return ReplayOut(replayed=len(done.deliveries), passed_over=done.passed_over, next_after=done.last)

    @router.post("/deliveries/{delivery_id}/replay", status_code=201)
    def replay_delivery(delivery_id: UUID, caller: Operate, database: Db, now: Now) -> DeliveryOut:
        """Send the event of a delivery to its endpoint once more, as a new delivery."""
        with database.transaction() as tx:
            past = deliveries.find(tx, caller.project_id, delivery_id)
            if past is None:
                raise NotFound(f"there is no delivery {delivery_id} in this project")
            _in_service(tx, caller.project_id, past.endpoint_id)
            made = replays.of_event(tx, caller.project_id, past.endpoint_id, past.event_id, now)
            if made is None:
                raise Conflict(f"the {past.event_type} no longer holds: its decision or its run has gone on since")
            delivery = deliveries.find(tx, caller.project_id, made)
            assert delivery is not None, "it was just made"
            return delivery_out(tx, delivery)

    @router.post("/endpoints/{endpoint_id}/test")
    def try_endpoint(endpoint_id: UUID, caller: Operate, database: Db, now: Now, vault: Secrets) -> TrialOut:
        """Send a signed `endpoint.test` now, and say what came back; it is no delivery, and is not repeated."""
        with database.reading() as tx:
            endpoint = _in_service(tx, caller.project_id, endpoint_id)
            project = projects.get(tx, caller.project_id)
        if endpoint.url.startswith(pull.PREFIX):
            raise Conflict("the events of this endpoint are fetched by its receiver; nothing can be sent there")
        data = {
            "project": {"id": str(project.id), "name": project.name},
            "endpoint": {"id": str(endpoint.id), "url": endpoint.url},
        }
        body = json.dumps({"type": TEST, "timestamp": rfc3339(now), "data": data}, separators=(",", ":"))
        valid = endpoints.valid_secrets(endpoint.secret, endpoint.previous_secret, endpoint.previous_secret_until, now)
        event_id = new_id()
        came = send(
            endpoint.url,
            [vault.open(kept, endpoint.id) for kept in valid],
            str(event_id),
            now,
            slack.rendered(endpoint.format, body).encode(),
        )
        delivered = came.status_code is not None and 200 <= came.status_code < 300
        return TrialOut.model_validate(vars(came) | {"event_id": event_id, "url": endpoint.url, "delivered": delivered})

    return router


def _in_service(tx: Transaction, project_id: UUID, endpoint_id: UUID) -> Endpoint:
    endpoint = endpoints.find(tx, project_id, endpoint_id)
    if endpoint is None:
        raise NotFound(f"there is no endpoint {endpoint_id} in this project")
    if not endpoint.enabled:
        raise Conflict("the endpoint is disabled; enable it first")
    return endpoint
