"""The page of webhooks: endpoints and how they are, deliveries and what came back, and events sent once more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlencode, urlsplit
from uuid import UUID

from fastapi import APIRouter, Form, Query, Response
from fastapi.responses import RedirectResponse

from evalstop_service.clock import in_utc
from evalstop_service.errors import Invalid, NotFound
from evalstop_service.rules.event_types import SUBSCRIBABLE
from evalstop_service.security.address_policy import AddressRefused
from evalstop_service.store import endpoints
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.queue import deliveries, pull
from evalstop_service.store.queue.deliveries import Delivery
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import Administering, Operating, SignedIn, Site, SiteOf, Visitor
from evalstop_service.webhooks import endpoint_test, resend
from evalstop_service.webhooks import endpoints as webhooks
from evalstop_service.webhooks.channels import Format, render_body
from evalstop_service.webhooks.endpoints import MAX_URL_CHARACTERS, EndpointChanges

router = APIRouter(prefix="/webhooks", route_class=PageRoute)

PAGE = 30

State = Literal["", "waiting", "delivered", "dead", "cancelled"]

_HOME = "/webhooks"


@router.get("")
def show_webhooks(
    site: SiteOf,
    visitor: SignedIn,
    state: State = "",
    endpoint: Annotated[UUID | Literal[""], Query()] = "",
    cursor: UUID | None = None,
) -> Response:
    """All endpoints, and deliveries, newest first."""
    return _show(site, visitor, state=state, endpoint=endpoint or None, cursor=cursor)


@router.get("/deliveries/{delivery_id}")
def show_delivery(delivery_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """One delivery: what is sent, and every attempt with its answer."""
    with site.database.reading() as tx:
        delivery = deliveries.find_delivery(tx, visitor.project.id, delivery_id)
        if delivery is None:
            raise NotFound
        content = deliveries.get_content(tx, delivery)
        log = deliveries.list_attempts(tx, delivery)
    return page(
        "delivery.html",
        visitor=visitor,
        here="webhooks",
        delivery=delivery,
        host=_host(delivery),
        log=log,
        body=render_body(content.format, content.body),
    )


@router.post("/endpoints")
def add_endpoint(
    site: SiteOf,
    visitor: Administering,
    url: Annotated[str, Form()] = "",
    event_types: Annotated[list[str] | None, Form()] = None,
    form: Annotated[str, Form(alias="format")] = "standard",
) -> Response:
    """Make an endpoint, and show its secret, once."""
    url = url.strip()
    try:
        made = webhooks.create_endpoint(
            site.database,
            visitor.project.id,
            visitor.actor,
            **_checked(url, event_types or [], form),
            address_policy=site.doors.address_policy,
            encryption=site.doors.encryption,
            now=site.clock(),
        )
    except (AddressRefused, Invalid) as error:
        return _show(site, visitor, problem=str(error), written=url, status=422)
    return _show(site, visitor, secret=_secret(site, made))


@router.post("/endpoints/{endpoint_id}/enabled")
def enable_endpoint(
    endpoint_id: UUID, site: SiteOf, visitor: Administering, enabled: Annotated[bool, Form()]
) -> Response:
    """Have events sent there, or no more."""
    changes = EndpointChanges(enabled=enabled)
    webhooks.change_endpoint(
        site.database,
        visitor.project.id,
        visitor.actor,
        endpoint_id,
        changes,
        address_policy=site.doors.address_policy,
        now=site.clock(),
    )
    return RedirectResponse(_HOME, 303)


@router.post("/endpoints/{endpoint_id}/delete")
def delete_endpoint(endpoint_id: UUID, site: SiteOf, visitor: Administering) -> Response:
    """Delete an endpoint and cancel what waits for it."""
    webhooks.delete_endpoint(site.database, visitor.project.id, visitor.actor, endpoint_id, site.clock())
    return RedirectResponse(_HOME, 303)


@router.post("/endpoints/{endpoint_id}/rotate-secret")
def rotate_secret(endpoint_id: UUID, site: SiteOf, visitor: Administering) -> Response:
    """Give an endpoint a new secret, and show it, once."""
    rotated = webhooks.rotate_endpoint_secret(
        site.database,
        visitor.project.id,
        visitor.actor,
        endpoint_id,
        encryption=site.doors.encryption,
        now=site.clock(),
    )
    return _show(site, visitor, secret=_secret(site, rotated))


@router.post("/endpoints/{endpoint_id}/test")
def try_endpoint(endpoint_id: UUID, site: SiteOf, visitor: Operating) -> Response:
    """Send a test now, and show what came back."""
    trial = endpoint_test.send_test_event(
        site.database,
        visitor.project.id,
        endpoint_id,
        address_policy=site.doors.address_policy,
        timeout_seconds=site.doors.delivery_timeout_seconds,
        encryption=site.doors.encryption,
        now=site.clock(),
    )
    return _show(site, visitor, trial=trial)


@router.post("/endpoints/{endpoint_id}/replay")
def replay_events(
    endpoint_id: UUID,
    site: SiteOf,
    visitor: Operating,
    since: Annotated[str, Form()] = "",
    until: Annotated[str, Form()] = "",
    after: Annotated[UUID | Literal[""], Form()] = "",
    replayed: Annotated[int, Form(ge=0)] = 0,
) -> Response:
    """Send the events of a time once more, a thousand at a time; the page that is answered goes on by itself."""
    now = site.clock()
    begin, end = _moment(since, "the first day"), _moment(until, "the last moment") if until else now
    done = resend.replay_events(
        site.database,
        visitor.project.id,
        visitor.actor,
        endpoint_id,
        since=begin,
        until=end,
        types=None,
        after=after or None,
        now=now,
    )
    reached = datetime.fromtimestamp((done.last.int >> 80) / 1000, UTC) if done.last else end  # a UUIDv7 tells its time
    share = (reached - begin) / (end - begin) if end > begin else 1.0
    return page(
        "replay.html",
        visitor=visitor,
        here="webhooks",
        endpoint_id=endpoint_id,
        since=begin.isoformat(),
        until=end.isoformat(),
        after=done.last,
        replayed=replayed + len(done.deliveries),
        passed_over=done.passed_over,
        percent=round(100 * min(1.0, max(0.0, share))),
    )


@router.post("/deliveries/{delivery_id}/retry")
def retry(delivery_id: UUID, site: SiteOf, visitor: Operating) -> Response:
    """Send a dead delivery once more."""
    resend.retry_delivery(site.database, visitor.project.id, visitor.actor, delivery_id, site.clock())
    return RedirectResponse(f"/webhooks/deliveries/{delivery_id}", 303)


@router.post("/deliveries/{delivery_id}/replay")
def replay_delivery(delivery_id: UUID, site: SiteOf, visitor: Operating) -> Response:
    """Send the event of a delivery once more, as a new delivery."""
    made = resend.replay_delivery(site.database, visitor.project.id, visitor.actor, delivery_id, site.clock())
    return RedirectResponse(f"/webhooks/deliveries/{made.id}", 303)


def _show(
    site: Site,
    visitor: Visitor,
    *,
    state: str = "",
    endpoint: UUID | None = None,
    cursor: UUID | None = None,
    status: int = 200,
    **told: Any,
) -> Response:
    with site.database.reading() as tx:
        found = endpoints.list_endpoints(tx, visitor.project.id)
        sent = deliveries.list_deliveries(
            tx, visitor.project.id, state=state or None, endpoint_id=endpoint, before=cursor, limit=PAGE + 1
        )
    more = str(sent[PAGE - 1].id) if len(sent) > PAGE else ""
    now = site.clock()
    values = {"problem": None, "secret": None, "trial": None, "written": ""} | told
    return page(
        "webhooks.html",
        status,
        visitor=visitor,
        here="webhooks",
        endpoints=[(one, _health(one, now), _place(one, visitor)) for one in found],
        deliveries=sent[:PAGE],
        hosts={one.id: _host(one) for one in found},
        state=state,
        chosen=endpoint,
        next_page=_link(state, endpoint, more) if more else None,
        first_page=_link(state, endpoint, "") if cursor else None,
        event_types=SUBSCRIBABLE,
        longest_url=MAX_URL_CHARACTERS,
        **values,
    )


def _link(state: str, endpoint: UUID | None, cursor: str) -> str:
    query = {"state": state, "endpoint": str(endpoint or ""), "cursor": cursor}
    return f"{_HOME}?{urlencode({name: value for name, value in query.items() if value})}"


def _checked(url: str, event_types: list[str], form: str) -> dict[str, Any]:
    try:
        if len(url) > MAX_URL_CHARACTERS:
            raise ValueError(f"an address has at most {MAX_URL_CHARACTERS} characters")
        if not event_types:
            raise ValueError("choose at least one kind of event")
        if form not in list(Format):
            raise ValueError(f"a format is one of {', '.join(Format)}")
        types = [webhooks.check_event_type(name) for name in dict.fromkeys(event_types)]
        return {"url": webhooks.check_url(url), "event_types": types, "format": form}
    except ValueError as error:
        raise Invalid(str(error)) from None


def _secret(site: Site, endpoint: Endpoint) -> tuple[str, str]:
    return _host(endpoint), site.doors.encryption.decrypt(endpoint.secret, endpoint.id)


def _health(endpoint: Endpoint, now: datetime) -> tuple[str, str]:
    """How an endpoint is: a class of badge, and words."""
    if not endpoint.enabled:
        return "plain", "disabled"
    if endpoint.open_until is not None and endpoint.open_until > now:
        return "state-failed", "left alone"
    if endpoint.failures:
        return "state-pending", "failing"
    return "outcome-right", "well"


def _place(endpoint: Endpoint, visitor: Visitor) -> str:
    # The path of an address may be a secret, as Slack's are.
    return endpoint.url if visitor.may("admin") else _host(endpoint)


def _host(addressed: Endpoint | Delivery) -> str:
    return addressed.url if addressed.url.startswith(pull.PREFIX) else str(urlsplit(addressed.url).netloc)


def _moment(text: str, what: str) -> datetime:
    try:
        return in_utc(datetime.fromisoformat(text))
    except ValueError:
        raise Invalid(f"{what} is no time as in 2026-01-31T14:00, in UTC: {text[:40]!r}") from None
