"""Webhooks as those who look after them handle them: endpoints made and changed, events sent once more, a test.

What is changed is written down in the audit log, where an endpoint is named by its id and host: the path of its URL may
be a secret.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from evalstop_service.clock import rfc3339
from evalstop_service.errors import Conflict, NotFound
from evalstop_service.security.address_policy import AddressPolicy, AddressRefused
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import audit, endpoints, projects
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import deliveries, pull, replays
from evalstop_service.store.queue.deliveries import Delivery
from evalstop_service.store.queue.outbox import EVENT_TYPES
from evalstop_service.store.queue.replays import Replayed
from evalstop_service.webhooks import slack
from evalstop_service.webhooks.event_schemas import TEST

MOST_REPLAYED = 1000

LONGEST_URL = 2048

FORMATS = ("standard", "slack")


@dataclass(frozen=True)
class Came:
    """What came back for one attempt."""

    status_code: int | None
    error: str | None
    answer: str | None
    duration_ms: float


Send = Callable[[str, Sequence[str], str, datetime, bytes], Came]
"""Sends a body, signed, now: URL, secrets, webhook-id, time, body."""


@dataclass(frozen=True)
class Trial:
    """What an endpoint answered to a test; `delivered`: with 2xx."""

    event_id: UUID
    url: str
    delivered: bool
    came: Came


@dataclass(frozen=True)
class EndpointChanges:
    """What is to be another; what is None stays."""

    url: str | None = None
    event_types: Sequence[str] | None = None
    format: str | None = None
    enabled: bool | None = None


def checked_url(url: str) -> str:
    """The URL of an endpoint; raises ValueError when it is none that events can be sent to."""
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


def checked_event_type(name: str) -> str:
    """What an endpoint can subscribe to; raises ValueError when there is no such type."""
    if name != "*" and name not in EVENT_TYPES:
        raise ValueError(f'"*" for all, or one of {", ".join(EVENT_TYPES)}')
    return name


def subscribe(
    database: Database,
    project_id: UUID,
    actor: str,
    *,
    url: str,
    event_types: Iterable[str],
    format: str,  # noqa: A002 - its name on the wire
    targets: AddressPolicy,
    encryption: Encryption,
    now: datetime,
) -> Endpoint:
    """Make an endpoint; raises Refused when nothing may be sent there."""
    _insist_on_reach(url, targets)
    with database.transaction() as tx:
        endpoint = endpoints.add(
            tx, project_id, url=url, event_types=event_types, format=format, now=now, encryption=encryption
        )
        _record(tx, actor, "endpoint.made", endpoint, now)
        return endpoint


def subscribe_puller(
    database: Database,
    project_id: UUID,
    actor: str,
    *,
    name: str,
    event_types: Iterable[str],
    encryption: Encryption,
    now: datetime,
) -> Endpoint:
    """Make an endpoint whose events are fetched."""
    with database.transaction() as tx:
        endpoint = pull.add(tx, project_id, name=name, event_types=event_types, now=now, encryption=encryption)
        _record(tx, actor, "endpoint.made", endpoint, now)
        return endpoint


def change(
    database: Database,
    project_id: UUID,
    actor: str,
    endpoint_id: UUID,
    changes: EndpointChanges,
    *,
    targets: AddressPolicy,
    now: datetime,
) -> Endpoint:
    """Change an endpoint; raises NotFound, and Refused when nothing may be sent to its new URL."""
    if changes.url is not None:
        _insist_on_reach(changes.url, targets)
    with database.transaction() as tx:
        endpoint = _present(endpoints.change(tx, project_id, endpoint_id, **vars(changes)), endpoint_id)
        _record(tx, actor, "endpoint.changed", endpoint, now)
        return endpoint


def rotate_secret(
    database: Database, project_id: UUID, actor: str, endpoint_id: UUID, *, encryption: Encryption, now: datetime
) -> Endpoint:
    """Give an endpoint a new secret, the one before it signing along for a day; raises NotFound."""
    with database.transaction() as tx:
        endpoint = _present(
            endpoints.rotate_secret(tx, project_id, endpoint_id, now=now, encryption=encryption), endpoint_id
        )
        _record(tx, actor, "endpoint.secret_rotated", endpoint, now)
        return endpoint


def delete(database: Database, project_id: UUID, actor: str, endpoint_id: UUID, now: datetime) -> None:
    """Delete an endpoint and cancel what waits for it; raises NotFound."""
    with database.transaction() as tx:
        endpoint = _present(endpoints.find(tx, project_id, endpoint_id), endpoint_id)
        if not endpoints.delete(tx, project_id, endpoint_id, now=now):
            _present(None, endpoint_id)
        _record(tx, actor, "endpoint.deleted", endpoint, now)


def retry(database: Database, project_id: UUID, actor: str, delivery_id: UUID, now: datetime) -> Delivery:
    """Send a dead delivery once more, now; raises NotFound, and Conflict when it is not dead or no longer holds."""
    with database.transaction() as tx:
        dead = deliveries.find(tx, project_id, delivery_id)
        if dead is not None and not replays.holds(tx, project_id, dead.event_id):
            raise Conflict(f"the {dead.event_type} no longer holds: its decision or its run has gone on since")
        revived = deliveries.retry(tx, project_id, delivery_id, now)
        delivery = deliveries.find(tx, project_id, delivery_id)
        if delivery is None:
            raise NotFound(f"there is no delivery {delivery_id} in this project")
        if not revived:
            raise Conflict(
                f"the delivery is {delivery.state}; only a dead one to an endpoint that exists is sent again"
            )
        told = {"event_type": delivery.event_type, "endpoint_id": str(delivery.endpoint_id)}
        audit.record(tx, project_id, actor, "delivery.retried", f"delivery {delivery_id}", told, now)
        return delivery


def replay(
    database: Database,
    project_id: UUID,
    actor: str,
    endpoint_id: UUID,
    *,
    since: datetime,
    until: datetime,
    types: Sequence[str] | None,
    after: UUID | None,
    now: datetime,
) -> Replayed:
    """Send the events of a time once more, at most `MOST_REPLAYED`; raises NotFound, Conflict on one that is off."""
    with database.transaction() as tx:
        endpoint = _in_service(tx, project_id, endpoint_id)
        done = replays.of_range(
            tx,
            project_id,
            endpoint_id,
            since=since,
            until=until,
            types=None if types is None or "*" in types else types,
            after=after,
            limit=MOST_REPLAYED,
            now=now,
        )
        told = {"since": rfc3339(since), "until": rfc3339(until), "deliveries": len(done.deliveries)}
        _record(tx, actor, "endpoint.replayed", endpoint, now, told)
        return done


def replay_delivery(database: Database, project_id: UUID, actor: str, delivery_id: UUID, now: datetime) -> Delivery:
    """Send the event of a delivery to its endpoint once more, as a new delivery; raises NotFound and Conflict."""
    with database.transaction() as tx:
        past = deliveries.find(tx, project_id, delivery_id)
        if past is None:
            raise NotFound(f"there is no delivery {delivery_id} in this project")
        _in_service(tx, project_id, past.endpoint_id)
        made = replays.of_event(tx, project_id, past.endpoint_id, past.event_id, now)
        if made is None:
            raise Conflict(f"the {past.event_type} no longer holds: its decision or its run has gone on since")
        delivery = deliveries.find(tx, project_id, made)
        assert delivery is not None, "it was just made"
        told = {"event_type": past.event_type, "endpoint_id": str(past.endpoint_id)}
        audit.record(tx, project_id, actor, "delivery.replayed", f"delivery {delivery_id}", told, now)
        return delivery


def try_endpoint(
    database: Database, project_id: UUID, endpoint_id: UUID, *, send: Send, encryption: Encryption, now: datetime
) -> Trial:
    """Send a signed `endpoint.test` now; raises NotFound, and Conflict on an endpoint that is off or is fetched."""
    with database.reading() as tx:
        endpoint = _in_service(tx, project_id, endpoint_id)
        project = projects.get(tx, project_id)
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
        [encryption.decrypt(kept, endpoint.id) for kept in valid],
        str(event_id),
        now,
        slack.rendered(endpoint.format, body).encode(),
    )
    delivered = came.status_code is not None and 200 <= came.status_code < 300
    return Trial(event_id, endpoint.url, delivered, came)


def _record(
    tx: Transaction,
    actor: str,
    action: str,
    endpoint: Endpoint,
    now: datetime,
    details: Mapping[str, Any] | None = None,
) -> None:
    host = endpoint.url if endpoint.url.startswith(pull.PREFIX) else urlsplit(endpoint.url).hostname
    told = {"host": host, "event_types": list(endpoint.event_types), "enabled": endpoint.enabled}
    audit.record(tx, endpoint.project_id, actor, action, f"endpoint {endpoint.id}", told | dict(details or {}), now)


def _in_service(tx: Transaction, project_id: UUID, endpoint_id: UUID) -> Endpoint:
    endpoint = _present(endpoints.find(tx, project_id, endpoint_id), endpoint_id)
    if not endpoint.enabled:
        raise Conflict("the endpoint is disabled; enable it first")
    return endpoint


def _present(endpoint: Endpoint | None, endpoint_id: UUID) -> Endpoint:
    if endpoint is None:
        raise NotFound(f"there is no endpoint {endpoint_id} in this project")
    return endpoint


def _insist_on_reach(url: str, targets: AddressPolicy) -> None:
    objection = targets.objection_to_url(url)
    if objection is not None:
        raise AddressRefused(objection)
