"""Sending by hand: events once more, of a time or one at a time, and a test of an endpoint."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from evalstop_service.web.api.deliveries import DeliveryOut, delivery_out
from evalstop_service.web.api.endpoints import EventTypes
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.schemas import Answer, Body, Time
from evalstop_service.web.context import Db, Now, Operate, Secrets
from evalstop_service.webhooks import endpoints
from evalstop_service.webhooks.endpoints import Send


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
        done = endpoints.replay(
            database,
            caller.project_id,
            caller.actor,
            endpoint_id,
            since=body.since,
            until=body.until or now,
            types=body.types,
            after=body.after,
            now=now,
        )
        return ReplayOut(replayed=len(done.deliveries), passed_over=done.passed_over, next_after=done.last)

    @router.post("/deliveries/{delivery_id}/replay", status_code=201)
    def replay_delivery(delivery_id: UUID, caller: Operate, database: Db, now: Now) -> DeliveryOut:
        """Send the event of a delivery to its endpoint once more, as a new delivery."""
        delivery = endpoints.replay_delivery(database, caller.project_id, caller.actor, delivery_id, now)
        with database.reading() as tx:
            return delivery_out(tx, delivery)

    @router.post("/endpoints/{endpoint_id}/test")
    def try_endpoint(endpoint_id: UUID, caller: Operate, database: Db, now: Now, encryption: Secrets) -> TrialOut:
        """Send a signed `endpoint.test` now, and say what came back; it is no delivery, and is not repeated."""
        trial = endpoints.try_endpoint(
            database, caller.project_id, endpoint_id, send=send, encryption=encryption, now=now
        )
        return TrialOut.model_validate(vars(trial.came) | vars(trial))

    return router
