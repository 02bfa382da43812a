"""The pages of webhooks: endpoints and their health, deliveries and their attempts, and retries."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Form, Query, Response
from fastapi.responses import RedirectResponse

from evalstop_service.domain.event_types import PRESETS, SUBSCRIBABLE
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.errors import Invalid
from evalstop_service.projects.project_settings import parse_form
from evalstop_service.security.address_policy import AddressRefused
from evalstop_service.store import endpoints
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.queue import outbox
from evalstop_service.web.api.endpoints import EndpointIn, send_test, store_endpoint
from evalstop_service.web.pages.formatting import format_json
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import Admin, FreshAdmin, Operator, SignedIn, Site, SiteOf, Visitor
from evalstop_service.webhooks import endpoints as webhooks
from evalstop_service.webhooks import resend
from evalstop_service.webhooks.channels import render_body
from evalstop_service.webhooks.endpoints import MAX_URL_CHARACTERS, name_host
from evalstop_service.webhooks.links import add_url

router = APIRouter(prefix="/webhooks", route_class=PageRoute)

PAGE = 30

State = Literal[""] | DeliveryState

_PATH = "/webhooks"


@router.get("")
def show_webhooks(
    site: SiteOf,
    visitor: SignedIn,
    state: State = "",
    endpoint: Annotated[UUID | Literal[""], Query()] = "",
    cursor: UUID | None = None,
) -> Response:
    """All endpoints, and the newest deliveries."""
    return _render_webhooks(site, visitor, state=state, endpoint=endpoint or None, cursor=cursor)


@router.get("/deliveries/{delivery_id}")
def show_delivery(delivery_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """One delivery: its request, and every attempt with its response."""
    with site.database.reading() as tx:
        delivery = outbox.load_delivery(tx, visitor.project.id, delivery_id)
        event, channel = outbox.get_content(tx, delivery)
        attempts = outbox.list_attempts(tx, delivery)
    return render_page(
        "delivery.html",
        visitor=visitor,
        here="webhooks",
        delivery=delivery,
        host=name_host(delivery.url),
        attempts=attempts,
        body=_indent(render_body(channel, add_url(event, site.context.public_url, delivery.run_id))),
    )


@router.post("/endpoints")
def add_endpoint(
    site: SiteOf,
    visitor: FreshAdmin,
    url: Annotated[str, Form()] = "",
    preset: Annotated[str, Form()] = "",
    event_types: Annotated[list[str] | None, Form()] = None,
    form: Annotated[str, Form(alias="format")] = "standard",
) -> Response:
    """Create an endpoint and show its secret once; selected event types take precedence over the preset."""
    url = url.strip()
    chosen = {"url": url, "event_types": event_types or None, "preset": preset or None, "format": form}
    try:
        endpoint = store_endpoint(site.context, visitor.author(site.clock()), parse_form(EndpointIn, chosen))
    except (AddressRefused, Invalid) as error:
        return _render_webhooks(site, visitor, problem=str(error), written=url, status=422)
    return _render_webhooks(site, visitor, secret=_reveal_secret(site, endpoint))


@router.post("/endpoints/{endpoint_id}/enabled")
def enable_endpoint(endpoint_id: UUID, site: SiteOf, visitor: FreshAdmin, enabled: Annotated[bool, Form()]) -> Response:
    """Enable or disable an endpoint."""
    author, address_policy = visitor.author(site.clock()), site.context.address_policy
    webhooks.change_endpoint(site.database, author, endpoint_id, {"enabled": enabled}, address_policy)
    return RedirectResponse(_PATH, 303)


@router.post("/endpoints/{endpoint_id}/delete")
def delete_endpoint(endpoint_id: UUID, site: SiteOf, visitor: Admin) -> Response:
    """Delete an endpoint and cancel its waiting deliveries."""
    webhooks.delete_endpoint(site.database, visitor.author(site.clock()), endpoint_id)
    return RedirectResponse(_PATH, 303)


@router.post("/endpoints/{endpoint_id}/rotate-secret")
def rotate_secret(endpoint_id: UUID, site: SiteOf, visitor: FreshAdmin) -> Response:
    """Rotate the secret of an endpoint and show the new one once."""
    encryption = site.context.encryption
    endpoint = webhooks.rotate_endpoint_secret(site.database, visitor.author(site.clock()), endpoint_id, encryption)
    return _render_webhooks(site, visitor, secret=_reveal_secret(site, endpoint))


@router.post("/endpoints/{endpoint_id}/test")
def test_endpoint(endpoint_id: UUID, site: SiteOf, visitor: Operator) -> Response:
    """Send a test event now and show the response."""
    trial = send_test(site.context, visitor.project.id, endpoint_id, site.clock())
    return _render_webhooks(site, visitor, trial=trial)


@router.post("/deliveries/{delivery_id}/replay")
def replay_delivery(delivery_id: UUID, site: SiteOf, visitor: Operator) -> Response:
    """Send the event of a delivery again, as a new delivery."""
    delivery = resend.replay_delivery(site.database, visitor.author(site.clock()), delivery_id)
    return RedirectResponse(f"/webhooks/deliveries/{delivery.id}", 303)


def _render_webhooks(
    site: Site,
    visitor: Visitor,
    *,
    state: State = "",
    endpoint: UUID | None = None,
    cursor: UUID | None = None,
    status: int = 200,
    **overrides: Any,
) -> Response:
    with site.database.reading() as tx:
        listed = endpoints.list_endpoints(tx, visitor.project.id)
        newest = outbox.list_deliveries(
            tx, visitor.project.id, state=state or None, endpoint_id=endpoint, before=cursor, limit=PAGE + 1
        )
    query = {"state": state, "endpoint": endpoint}
    now = site.clock()
    values = {"problem": None, "secret": None, "trial": None, "written": ""} | overrides
    return render_page(
        "webhooks.html",
        status,
        visitor=visitor,
        here="webhooks",
        endpoints=[
            # The path of a URL may be a secret, as with Slack.
            (endpoint, _choose_badge(endpoint, now), endpoint.url if visitor.may("admin") else name_host(endpoint.url))
            for endpoint in listed
        ],
        deliveries=newest[:PAGE],
        hosts={endpoint.id: name_host(endpoint.url) for endpoint in listed},
        state=state,
        chosen=endpoint,
        next_page=make_link(_PATH, {**query, "cursor": newest[PAGE - 1].id}) if len(newest) > PAGE else None,
        first_page=make_link(_PATH, query) if cursor else None,
        event_types=SUBSCRIBABLE,
        presets=PRESETS,
        longest_url=MAX_URL_CHARACTERS,
        **values,
    )


def _indent(body: str) -> str:
    """Format a body for people: JSON indented, anything else unchanged."""
    try:
        return format_json(json.loads(body))
    except ValueError:
        return body


def _reveal_secret(site: Site, endpoint: Endpoint) -> tuple[str, str, str]:
    return name_host(endpoint.url), site.context.encryption.decrypt(endpoint.secret, endpoint.id), endpoint.public_key


def _choose_badge(endpoint: Endpoint, now: datetime) -> tuple[str, str]:
    """The health of an endpoint: a CSS class and a label."""
    if not endpoint.enabled:
        return "plain", "disabled"
    if endpoint.open_until is not None and endpoint.open_until > now:
        return "state-failed", "paused"
    if endpoint.failures:
        return "state-pending", "failing"
    return "outcome-right", "healthy"
