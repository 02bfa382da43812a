"""Webhook endpoints: where a project wants its events sent."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit
from uuid import UUID

from fastapi import APIRouter
from pydantic import AfterValidator, Field

from evalstop_service.api.bodies import JsonRoute
from evalstop_service.api.context import Admin, Db, MayReach, Now, Secrets
from evalstop_service.api.problems import Problem
from evalstop_service.api.schemas import Answer, Body, Plain, Time
from evalstop_service.errors import NotFound
from evalstop_service.store import endpoints
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.outbox import EVENT_TYPES
from evalstop_service.targets import Targets
from evalstop_service.vault import Vault

router = APIRouter(prefix="/endpoints", tags=["webhooks"], route_class=JsonRoute)


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or any(character.isspace() for character in url):
        raise ValueError("an absolute http or https URL, as in https://receiver.example:8788/")
    if parts.username or parts.password:
        raise ValueError("no user or password in the URL; the signature is what proves the sender")
    return url


def _event_type(name: str) -> str:
    if name != "*" and name not in EVENT_TYPES:
        raise ValueError(f'"*" for all, or one of {", ".join(EVENT_TYPES)}')
    return name


Address = Annotated[str, Field(min_length=1, max_length=2048), Plain, AfterValidator(_address)]
EventTypes = Annotated[
    list[Annotated[str, AfterValidator(_event_type)]], Field(min_length=1, max_length=20, fail_fast=True)
]


Format = Literal["standard", "slack"]


class EndpointIn(Body):
    """A new endpoint."""

    url: Address = Field(examples=["https://receiver.example:8788/"])
    event_types: EventTypes = Field(["run.stop_requested"], examples=[["run.stop_requested"], ["*"]])
    format: Format = Field("standard", description="slack: a short text with blocks, as Slack's incoming webhooks take")


class EndpointChange(Body):
    """What is to change; what is left out stays."""

    url: Address | None = None
    event_types: EventTypes | None = None
    format: Format | None = None
    enabled: bool | None = None


class EndpointOut(Answer):
    """An endpoint without its secret."""

    id: UUID
    url: str
    event_types: list[str]
    format: Format
    enabled: bool
    created_at: Time
    failures: int = Field(description="one after the other, up to now")
    open_until: Time | None = Field(description="nothing is sent before, since it failed so often; then one attempt is")
    previous_secret_until: Time | None = Field(description="until then the secret before this one signs too")


class EndpointWithSecret(EndpointOut):
    """An endpoint with the secret that signs what is sent to it, which is never shown again."""

    secret: str = Field(examples=["whsec_..."])


class EndpointList(Answer):
    """The project's endpoints, oldest first."""

    items: list[EndpointOut]


@router.get("")
def list_endpoints(caller: Admin, database: Db) -> EndpointList:
    """All endpoints of the project."""
    with database.reading() as tx:
        return EndpointList.model_validate({"items": endpoints.listing(tx, caller.project_id)})


@router.post("", status_code=201)
def add_endpoint(
    body: EndpointIn, caller: Admin, database: Db, now: Now, targets: MayReach, vault: Secrets
) -> EndpointWithSecret:
    """Subscribe a URL to events."""
    _reachable(body.url, targets)
    with database.transaction() as tx:
        endpoint = endpoints.add(
            tx,
            project_id=caller.project_id,
            url=body.url,
            event_types=body.event_types,
            format=body.format,
            now=now,
            vault=vault,
        )
    return with_secret(endpoint, vault)


@router.patch("/{endpoint_id}")
def change_endpoint(
    endpoint_id: UUID, body: EndpointChange, caller: Admin, database: Db, targets: MayReach
) -> EndpointOut:
    """Change where, what and whether events are sent; deliveries that wait go to the new URL."""
    if body.url is not None:
        _reachable(body.url, targets)
    with database.transaction() as tx:
        endpoint = endpoints.change(
            tx,
            caller.project_id,
            endpoint_id,
            url=body.url,
            event_types=body.event_types,
            format=body.format,
            enabled=body.enabled,
        )
    return EndpointOut.model_validate(_present(endpoint, endpoint_id))


@router.post("/{endpoint_id}/rotate-secret")
def rotate_secret(endpoint_id: UUID, caller: Admin, database: Db, now: Now, vault: Secrets) -> EndpointWithSecret:
    """Give the endpoint a new secret; the one before it signs along for a day."""
    with database.transaction() as tx:
        endpoint = endpoints.rotate_secret(tx, caller.project_id, endpoint_id, now=now, vault=vault)
    return with_secret(_present(endpoint, endpoint_id), vault)


@router.delete("/{endpoint_id}", status_code=204)
def delete_endpoint(endpoint_id: UUID, caller: Admin, database: Db, now: Now) -> None:
    """Delete the endpoint and cancel what waits for it."""
    with database.transaction() as tx:
        if not endpoints.delete(tx, caller.project_id, endpoint_id, now=now):
            _present(None, endpoint_id)


def with_secret(endpoint: Endpoint, vault: Vault) -> EndpointWithSecret:
    """An endpoint with the secret that it was just given."""
    return EndpointWithSecret.model_validate(vars(endpoint) | {"secret": vault.open(endpoint.secret, endpoint.id)})


def _reachable(url: str, targets: Targets) -> None:
    objection = targets.objection_to_url(url)
    if objection is not None:
        raise Problem(
            422,
            "Webhooks may not go there",
            "nothing was changed; deliveries are held to the same rule at every connection",
            errors=[{"pointer": "/url", "detail": objection}],
        )


def _present(endpoint: Endpoint | None, endpoint_id: UUID) -> Endpoint:
    if endpoint is None:
        raise NotFound(f"there is no endpoint {endpoint_id} in this project")
    return endpoint
