"""Routes of webhooks: endpoints (create, change, test, send events again), deliveries, and the schemas of events."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query
from pydantic import Field, RootModel

from evalstop_service.domain.event_types import PRESETS, SUBSCRIBABLE, EventType
from evalstop_service.domain.fields import Body, Plain, Rule
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Transaction
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.outbox import Delivery, DeliveryAttempt
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.list_filters import CreatedQuery
from evalstop_service.web.api.schemas import Answer, DeliveryId, EndpointId, Items, Page, answers
from evalstop_service.web.context import Admin, Context, Ctx, Db, Now, Operate, Read
from evalstop_service.webhooks import endpoints as webhooks
from evalstop_service.webhooks import resend
from evalstop_service.webhooks.channels import Format
from evalstop_service.webhooks.endpoints import (
    MAX_URL_CHARACTERS,
    check_event_type,
    check_preset,
    check_url,
    choose_preset,
)
from evalstop_service.webhooks.events import build_schema
from evalstop_service.webhooks.resend import TestResult, send_test_event

router = create_router("webhooks")

URL = r"^mailto:([^\s@,:;<>\x00-\x1f\x7f-\x9f]+@[A-Za-z0-9.-]+|owner)$|^[Hh][Tt][Tt][Pp][Ss]?://([^/?#@:\[\]\s\x00-\x1f\x7f-\x9f]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?([/?#][^\s\x00-\x1f\x7f-\x9f]*)?$"

Address = Annotated[str, Field(min_length=1, max_length=MAX_URL_CHARACTERS), Plain, Rule(check_url, {"pattern": URL})]
EventTypes = Annotated[
    list[Annotated[str, Rule(check_event_type, {"enum": ["*", *SUBSCRIBABLE]})]],
    Field(min_length=1, max_length=20, fail_fast=True),
]

PresetIn = Annotated[str, Rule(check_preset, {"enum": list(PRESETS)})]
FormatIn = Annotated[Format, Field(strict=False)]


class Subscription(Body):
    """What a new endpoint gets."""

    event_types: EventTypes | None = Field(
        None,
        description="the types of events that it gets; `*`: all that require no action; null: those of `preset`",
        examples=[["run.stop_requested"], ["*"]],
    )
    preset: PresetIn | None = Field(
        None,
        description="whom the endpoint is for: "
        + "; ".join(f"{name}: {preset.purpose}" for name, preset in PRESETS.items())
        + "; null: owner for `mailto:owner`, team for formats for people, else receiver",
    )

    def list_event_types(self, default: str) -> list[str]:
        """The types that it subscribes to; `default`: the preset if neither types nor a preset are given."""
        return self.event_types or list(PRESETS[self.preset or default].event_types)


class EndpointIn(Subscription):
    """A new endpoint."""

    url: Address = Field(
        description="where events are posted; for the format email, mailto:ADDRESS or mailto:owner",
        examples=["https://receiver.example:9000/"],
    )
    format: FormatIn = Field(
        Format.STANDARD, description="standard for receivers; slack, teams (an Adaptive Card) and email for people"
    )


class EndpointChange(Body):
    """Changes to an endpoint; omitted fields keep their values."""

    url: Address | None = Field(None, description="waiting deliveries go there too")
    event_types: EventTypes | None = Field(None, description="the types of events that it gets from now on")
    format: FormatIn | None = Field(None, description="standard for receivers; slack, teams and email for people")
    enabled: bool | None = Field(None, description="false: nothing is sent there")


@answers(Endpoint)
class EndpointOut(Answer):
    """An endpoint without its secret."""

    format: Format = Field(description="the format of its events")
    public_key: str = Field(
        description="public key of the `v1a` signatures: a receiver that has only this key cannot forge events",
        examples=["whpk_..."],
    )


class EndpointWithSecret(EndpointOut):
    """An endpoint with its signing secret, which is shown only once."""

    secret: str = Field(description="verifies the signatures of events; shown only once", examples=["whsec_..."])


@answers(TestResult)
@answers(DeliveryAttempt, "status_code answer duration_ms")
class TestOut(Answer):
    """An endpoint's answer to a test event; `delivered`: a 2xx status."""

    error: str | None = Field(description="why it was not delivered; null: it was")


@router.get("/endpoints")
def list_endpoints(caller: Admin, database: Db) -> Items[EndpointOut]:
    """All endpoints of the project, oldest first."""
    with database.reading() as tx:
        return Items[EndpointOut].model_validate({"items": endpoints.list_endpoints(tx, caller.project_id)})


@router.post("/endpoints", status_code=201)
def create_endpoint(body: EndpointIn, caller: Admin, context: Ctx, now: Now) -> EndpointWithSecret:
    """Create an endpoint for a URL."""
    return view_with_secret(store_endpoint(context, caller.author(now), body), context.encryption)


def store_endpoint(context: Context, author: Author, body: EndpointIn) -> Endpoint:
    """Add the endpoint of a body or a form; raises AddressRefused, QuotaReached, and Conflict if its URL is taken."""
    return webhooks.create_endpoint(
        context.database,
        author,
        url=body.url,
        event_types=body.list_event_types(choose_preset(body.url, body.format)),
        format=body.format,
        address_policy=context.address_policy,
        encryption=context.encryption,
    )


@router.patch("/endpoints/{endpoint_id}")
def change_endpoint(
    endpoint_id: EndpointId, body: EndpointChange, caller: Admin, context: Ctx, now: Now
) -> EndpointOut:
    """Change an endpoint; waiting deliveries go to the new URL."""
    changes = body.model_dump(exclude_none=True)
    author = caller.author(now)
    endpoint = webhooks.change_endpoint(context.database, author, endpoint_id, changes, context.address_policy)
    return EndpointOut.model_validate(endpoint)


@router.post("/endpoints/{endpoint_id}/rotate-secret")
def rotate_endpoint_secret(endpoint_id: EndpointId, caller: Admin, context: Ctx, now: Now) -> EndpointWithSecret:
    """Rotate the signing secret; the previous one stays valid for a day."""
    author = caller.author(now)
    endpoint = webhooks.rotate_endpoint_secret(context.database, author, endpoint_id, context.encryption)
    return view_with_secret(endpoint, context.encryption)


@router.delete("/endpoints/{endpoint_id}", status_code=204)
def delete_endpoint(endpoint_id: EndpointId, caller: Admin, database: Db, now: Now) -> None:
    """Delete the endpoint and cancel its waiting deliveries."""
    webhooks.delete_endpoint(database, caller.author(now), endpoint_id)


@router.post("/endpoints/{endpoint_id}/test")
def test_endpoint(endpoint_id: EndpointId, caller: Operate, context: Ctx, now: Now) -> TestOut:
    """Send a signed `endpoint.test` event now and return the endpoint's answer; it is not a delivery and is not
    retried."""
    tested = send_test(context, caller.project_id, endpoint_id, now)
    return TestOut.model_validate(vars(tested.answer) | vars(tested) | {"answer": tested.answer.excerpt})


def send_test(context: Context, project_id: UUID, endpoint_id: UUID, now: datetime) -> TestResult:
    """Send a test event; raises NotFound, and Conflict when the endpoint is disabled or its receiver fetches events."""
    context.limits.spend_costly()
    return send_test_event(
        context.database,
        project_id,
        endpoint_id,
        address_policy=context.address_policy,
        encryption=context.encryption,
        timeout_seconds=context.delivery_timeout_seconds,
        mail=context.mail,
        now=now,
    )


def view_with_secret(endpoint: Endpoint, encryption: Encryption) -> EndpointWithSecret:
    """An endpoint with its new secret."""
    return EndpointWithSecret.model_validate(
        vars(endpoint) | {"secret": encryption.decrypt(endpoint.secret, endpoint.id)}
    )


class EventSchemas(RootModel[dict[str, dict[str, Any]]]):
    """A JSON Schema (2020-12) for each type of event, with an example."""


@router.get("/events/schemas")
def list_event_schemas(caller: Read) -> EventSchemas:
    """The JSON Schemas (2020-12) of all event types, by type, each with an example."""
    return EventSchemas({event_type: build_schema(event_type) for event_type in EventType})


@answers(DeliveryAttempt)
class AttemptOut(Answer):
    """One attempt. A number is missing if a worker died during that attempt."""


@answers(Delivery)
class DeliveryOut(Answer):
    """One event on its way to one endpoint."""

    log: list[AttemptOut] = Field(description="every attempt, oldest first")


class DeliveryQuery(CreatedQuery):
    """Which deliveries to list, and which page."""

    state: DeliveryState | None = Field(None, description="deliveries in this state")
    endpoint_id: UUID | None = Field(None, description="deliveries to this endpoint")
    run_id: UUID | None = Field(None, description="deliveries of events about this run")
    event_type: EventType | None = Field(None, description="deliveries of events of this type")


@router.get("/deliveries")
def list_deliveries(caller: Read, database: Db, query: Annotated[DeliveryQuery, Query()]) -> Page[DeliveryOut]:
    """The project's deliveries, newest first."""
    with database.reading() as tx:
        listed = outbox.list_deliveries(tx, caller.project_id, **query.to_arguments())
        return Page[DeliveryOut].of([view_delivery(tx, delivery) for delivery in listed], query.limit)


@router.get("/deliveries/{delivery_id}")
def get_delivery(delivery_id: DeliveryId, caller: Read, database: Db) -> DeliveryOut:
    """A delivery with every attempt."""
    with database.reading() as tx:
        return view_delivery(tx, outbox.load_delivery(tx, caller.project_id, delivery_id))


@router.post("/deliveries/{delivery_id}/replay", status_code=201)
def replay_delivery(delivery_id: DeliveryId, caller: Operate, database: Db, now: Now) -> DeliveryOut:
    """Send the event of a delivery to its endpoint again, as a new delivery."""
    delivery = resend.replay_delivery(database, caller.author(now), delivery_id)
    with database.reading() as tx:
        return view_delivery(tx, delivery)


def view_delivery(tx: Transaction, delivery: Delivery) -> DeliveryOut:
    """A delivery with all its attempts."""
    return DeliveryOut.model_validate(vars(delivery) | {"log": outbox.list_attempts(tx, delivery)})
