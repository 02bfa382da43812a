"""Endpoints, events and their deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.event_types import NAMED_EVENTS, URGENT_EVENTS
from evalstop_service.domain.fields import doc
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store.tables.columns import (
    EnumText,
    UtcTime,
    make_table,
    metadata,
    of_run,
    part_of,
    partial_index,
)


@dataclass(frozen=True)
class Endpoint:
    """One URL with its subscription; secrets are as stored.

    `*` in `event_types` covers every informational event but `NAMED_EVENTS`. Events that request an action are for
    receivers that name them explicitly; a chat gets them by `*` too, because no receiver acts on its messages.

    `signing_key` adds a signature for receivers that have only `public_key` and so cannot forge events.

    `format` is `standard`, or one for people to read. `failures`: consecutive, up to now. Nothing is sent before
    `open_until`.
    """

    id: Annotated[UUID, doc("id of the endpoint")]
    project_id: UUID
    url: Annotated[str, doc("where events are posted; `pull:NAME`: a receiver fetches them")]
    event_types: Annotated[tuple[str, ...], doc("the types of events that it gets; `*`: all that require no action")]
    secret: str
    previous_secret: str | None
    previous_secret_until: Annotated[datetime | None, doc("the previous secret also signs until then")]
    signing_key: str
    public_key: str
    enabled: Annotated[bool, doc("false: nothing is sent there")]
    created_at: Annotated[datetime, doc("when it was created")]
    format: str = "standard"
    failures: Annotated[int, doc("consecutive failures")] = 0
    open_until: Annotated[datetime | None, doc("paused after repeated failures until this time")] = None

    def wants(self, event_type: str) -> bool:
        """Whether an event of this type is to be sent here."""
        tells = event_type not in NAMED_EVENTS and (event_type not in URGENT_EVENTS or self.format != "standard")
        return event_type in self.event_types or ("*" in self.event_types and tells)


endpoints = make_table(
    "endpoints",
    Endpoint,
    sa.Column("deleted_at", UtcTime),
    sa.Index("ix_endpoints_project_id", "project_id"),
    refers="project_id",
    defaults={"format": "standard", "failures": "0"},
)

events = sa.Table(
    "events",
    metadata,
    of_run(),
    sa.Column("id", sa.Uuid),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("decision_id", sa.Uuid),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # the signed bytes, so that every attempt sends the same
    sa.Column("created_at", UtcTime, nullable=False),
    sa.PrimaryKeyConstraint("run_id", "id"),
    sa.Index("ix_events_project_id_id", "project_id", "id"),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    *part_of("events", "event_id"),
    sa.Column("id", sa.Uuid),
    sa.Column("endpoint_id", sa.Uuid, sa.ForeignKey("endpoints.id"), nullable=False),
    sa.Column("state", EnumText(DeliveryState), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("due_at", UtcTime, nullable=False),  # while leased: the end of the lease
    sa.Column("urgent", sa.Boolean, nullable=False, server_default=sa.false()),  # overtakes others of its run
    sa.Column("last_error", sa.Text),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("settled_at", UtcTime),
    sa.PrimaryKeyConstraint("run_id", "id"),
    sa.Index("ix_deliveries_id", "id"),
    sa.Index("ix_deliveries_event_id", "event_id"),
    # The queue of each endpoint, and the urgent deliveries of a run to an endpoint.
    partial_index("ix_deliveries_endpoint_id", "endpoint_id", "due_at", "id", where="state = 'waiting'"),
    partial_index("ix_deliveries_endpoint_id_run_id", "endpoint_id", "run_id", "id", where="state = 'waiting'"),
)


@dataclass(frozen=True)
class DeliveryAttempt:
    """One settled attempt; a missing number belongs to a worker that died."""

    number: Annotated[int, doc("counted from 1")]
    at: Annotated[datetime, doc("when it ended")]
    duration_ms: Annotated[float, doc("from connecting to the answer, in milliseconds")]
    status_code: Annotated[int | None, doc("HTTP status of the answer; null: no answer")]
    error: Annotated[str | None, doc("why it failed; null: it succeeded")]
    url: Annotated[str | None, doc("where it was sent")]
    answer: Annotated[str | None, doc("the start of the response")]


delivery_attempts = make_table(
    "delivery_attempts", DeliveryAttempt, *part_of("deliveries", "delivery_id"), key="run_id delivery_id number"
)
