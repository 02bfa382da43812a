"""Creates, changes and deletes webhook endpoints, and records each change in the audit log.

The audit log identifies an endpoint only by its id and host: the path of its URL may be a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from evalstop_service.domain.event_types import PRESETS, SUBSCRIBABLE
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.security.address_policy import AddressPolicy, AddressRefused
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import counts, endpoints, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.webhooks.channels import OWNER, SCHEME, Format, is_mail_url

MAX_URL_CHARACTERS = 2048


def check_url(url: str) -> str:
    """Return the URL of an endpoint; raises ValueError unless events can be sent to it."""
    if is_mail_url(url):
        return url
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or any(character.isspace() for character in url):
        raise ValueError("an absolute http or https URL, as in https://receiver.example:9000/, or mailto:ADDRESS")
    if parts.username or parts.password:
        raise ValueError("no user or password in the URL; the signature authenticates the sender")
    return url


def check_event_type(name: str) -> str:
    """Return an event type that an endpoint can subscribe to; raises ValueError when there is no such type."""
    if name != "*" and name not in SUBSCRIBABLE:
        raise ValueError(f'"*" for all that require no action, or one of {", ".join(SUBSCRIBABLE)}')
    return name


def check_preset(name: str) -> str:
    """Return the name of a preset; raises ValueError when there is no such preset."""
    if name not in PRESETS:
        raise ValueError(f"one of {', '.join(PRESETS)}")
    return name


def choose_preset(url: str, endpoint_format: str) -> str:
    """The preset of an endpoint whose types are not given."""
    if endpoint_format == Format.STANDARD:
        return "receiver"
    return "owner" if url == SCHEME + OWNER else "team"


def create_endpoint(
    database: Database,
    author: Author,
    url: str,
    event_types: Iterable[str],
    encryption: Encryption,
    *,
    format: str = Format.STANDARD,  # noqa: A002 - the name of the API field
    address_policy: AddressPolicy | None = None,
) -> Endpoint:
    """Add an endpoint; raises AddressRefused when its URL is not allowed, QuotaReached, and Conflict if it is taken.

    `address_policy`: None, if its receiver fetches its events.
    """
    if address_policy is not None:
        _require_allowed(url, address_policy)
    _require_fitting(url, format)
    with database.transaction() as tx:
        counts.require_room(tx, projects.lock_project(tx, author.project_id), "endpoints", author.at)
        _require_own_url(tx, author.project_id, url)
        given: dict[str, Any] = {"event_types": event_types, "format": format, "encryption": encryption}
        endpoint = endpoints.add_endpoint(tx, author.project_id, url=url, now=author.at, **given)
        _record_change(tx, author, "endpoint.created", endpoint)
        return endpoint


def change_endpoint(
    database: Database, author: Author, endpoint_id: UUID, changes: Mapping[str, Any], address_policy: AddressPolicy
) -> Endpoint:
    """Change fields of an endpoint; raises NotFound, AddressRefused when its new URL is not allowed, Conflict if it is
    taken."""
    if (url := changes.get("url")) is not None:
        _require_allowed(url, address_policy)
    with database.transaction() as tx:
        if url is not None:
            projects.lock_project(tx, author.project_id)
            _require_own_url(tx, author.project_id, url, endpoint_id)
        endpoint = endpoints.update_endpoint(tx, author.project_id, endpoint_id, **changes)
        _require_fitting(endpoint.url, endpoint.format)
        _record_change(tx, author, "endpoint.changed", endpoint)
        return endpoint


def rotate_endpoint_secret(database: Database, author: Author, endpoint_id: UUID, encryption: Encryption) -> Endpoint:
    """Give an endpoint a new secret; the previous one also signs for another day. Raises NotFound."""
    with database.transaction() as tx:
        endpoint = endpoints.rotate_secret(tx, author.project_id, endpoint_id, now=author.at, encryption=encryption)
        _record_change(tx, author, "endpoint.secret_rotated", endpoint)
        return endpoint


def delete_endpoint(database: Database, author: Author, endpoint_id: UUID) -> None:
    """Delete an endpoint and cancel its waiting deliveries; raises NotFound."""
    with database.transaction() as tx:
        endpoint = endpoints.load_endpoint(tx, author.project_id, endpoint_id)
        endpoints.delete_endpoint(tx, author.project_id, endpoint_id, now=author.at)
        _record_change(tx, author, "endpoint.deleted", endpoint)


def require_enabled(tx: Transaction, project_id: UUID, endpoint_id: UUID) -> Endpoint:
    """The endpoint; raises NotFound, and Conflict when it is disabled."""
    endpoint = endpoints.load_endpoint(tx, project_id, endpoint_id)
    if not endpoint.enabled:
        raise Conflict("the endpoint is disabled; enable it first")
    return endpoint


def _record_change(tx: Transaction, author: Author, action: str, endpoint: Endpoint) -> None:
    """Record a change to an endpoint in the audit log."""
    recorded = {"host": name_host(endpoint.url), "event_types": list(endpoint.event_types), "enabled": endpoint.enabled}
    author.record(tx, action, f"endpoint {endpoint.id}", recorded)


def name_host(url: str) -> str:
    """The part of an endpoint's URL that may be shown to anyone: its path may be a secret."""
    return url if url.startswith((endpoints.PULL_PREFIX, SCHEME)) else urlsplit(url).netloc


def _require_fitting(url: str, endpoint_format: str) -> None:
    if is_mail_url(url) != (endpoint_format == Format.EMAIL):
        raise Invalid("url: mailto:ADDRESS and mailto:owner require the format email, which takes no other URL")


def _require_own_url(tx: Transaction, project_id: UUID, url: str, endpoint_id: UUID | None = None) -> None:
    """With two endpoints a receiver would get each stop twice, once signed by a secret it lacks."""
    for endpoint in endpoints.list_endpoints(tx, project_id):
        if endpoint.url == url and endpoint.id != endpoint_id:
            raise Conflict(f"endpoint {endpoint.id} has this URL; change its event types or its secret, or delete it")


def _require_allowed(url: str, address_policy: AddressPolicy) -> None:
    objection = None if is_mail_url(url) else address_policy.find_url_objection(url)
    if objection is not None:
        raise AddressRefused(objection)
