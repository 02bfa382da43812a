"""Sends events at an operator's request: again, with an entry in the audit log, or as a test of an endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

import msgspec

from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.fields import doc
from evalstop_service.errors import Conflict
from evalstop_service.security.address_policy import AddressPolicy
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.outbox import Delivery
from evalstop_service.webhooks.channels import render_body
from evalstop_service.webhooks.delivery.mail import EmailSettings
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.endpoints import require_enabled
from evalstop_service.webhooks.events import build_data
from evalstop_service.webhooks.retry import Answer
from evalstop_service.webhooks.signature import sign_headers


def replay_delivery(database: Database, author: Author, delivery_id: UUID) -> Delivery:
    """Send the event of a delivery to its endpoint again, as a new delivery; raises NotFound and Conflict."""
    with database.transaction() as tx:
        earlier = outbox.load_delivery(tx, author.project_id, delivery_id)
        event_type = earlier.event_type
        if not require_enabled(tx, author.project_id, earlier.endpoint_id).wants(event_type):
            raise Conflict(f"the endpoint does not subscribe to {event_type}")
        new_delivery_id = outbox.replay_event(tx, author.project_id, earlier.endpoint_id, earlier.event_id, author.at)
        if new_delivery_id is None:
            raise Conflict(f"the {event_type} no longer holds: its decision or its run has since changed")
        details = {"event_type": event_type, "endpoint_id": str(earlier.endpoint_id)}
        author.record(tx, "delivery.replayed", f"delivery {earlier.id}", details)
        return outbox.load_delivery(tx, author.project_id, new_delivery_id)


@dataclass(frozen=True)
class TestResult:
    """An endpoint's answer to a test event; `delivered` means a 2xx status."""

    __test__ = False  # keeps pytest from collecting this class

    event_id: Annotated[UUID, doc("the `webhook-id` of the test")]
    url: Annotated[str, doc("where it was sent")]
    delivered: Annotated[bool, doc("whether the answer was 2xx")]
    answer: Answer


def send_test_event(
    database: Database,
    project_id: UUID,
    endpoint_id: UUID,
    *,
    address_policy: AddressPolicy,
    encryption: Encryption,
    timeout_seconds: float,
    mail: EmailSettings,
    now: datetime,
) -> TestResult:
    """Send the event from this thread, which must not run an event loop; it is not a delivery and is not retried.

    Raises NotFound, and Conflict when the endpoint is disabled or its receiver fetches its events.
    """
    with database.reading() as tx:
        endpoint = require_enabled(tx, project_id, endpoint_id)
        project = projects.get_project(tx, project_id)
    if endpoint.url.startswith(endpoints.PULL_PREFIX):
        raise Conflict("the receiver of this endpoint fetches its events; nothing can be sent to it")
    data = build_data(EventType.ENDPOINT_TEST, {"project": project, "endpoint": endpoint})
    event = {"type": EventType.ENDPOINT_TEST, "timestamp": now.astimezone(UTC), "data": data}
    body = render_body(endpoint.format, msgspec.json.encode(event).decode()).encode()
    event_id = new_id()
    secrets = endpoints.decrypt_signing_keys(endpoint, endpoint.id, now, encryption)
    headers = sign_headers(secrets, str(event_id), int(now.timestamp()), body)

    async def send() -> Answer:
        async with Sender(timeout_seconds, address_policy=address_policy, mail=mail) as sender:
            return await sender.send(endpoint.url, headers, body)

    answer = asyncio.run(send())
    return TestResult(event_id, endpoint.url, answer.is_accepted, answer)
