"""Webhook endpoints, events and deliveries."""

from __future__ import annotations

import sqlalchemy as sa

from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store.tables.columns import (
    EnumText,
    StructJson,
    UtcTime,
    metadata,
    of_run,
    own_id,
    part_of,
    partial_index,
)

endpoints = sa.Table(
    "endpoints",
    metadata,
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False, index=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("event_types", StructJson(tuple[str, ...]), nullable=False),
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("previous_secret", sa.Text),
    sa.Column("previous_secret_until", UtcTime),
    sa.Column("signing_key", sa.Text, nullable=False),  # private; receivers have the public key
    sa.Column("public_key", sa.Text, nullable=False),
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("deleted_at", UtcTime),
    sa.Column("format", sa.Text, nullable=False, server_default="standard"),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),  # consecutive, up to now
    sa.Column("open_until", UtcTime),  # circuit breaker: nothing is sent before
)

events = sa.Table(
    "events",
    metadata,
    of_run(),
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("decision_id", sa.Uuid),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # the signed bytes, so that every attempt sends the same
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Index("ix_events_project_id_id", "project_id", "id"),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    *part_of("events", "event_id", nullable=False),
    own_id(primary_key=True),
    sa.Column("endpoint_id", sa.Uuid, sa.ForeignKey("endpoints.id"), nullable=False),
    sa.Column("state", EnumText(DeliveryState), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("due_at", UtcTime, nullable=False),  # while leased: the end of the lease
    sa.Column("urgent", sa.Boolean, nullable=False, server_default=sa.false()),  # overtakes others of its run
    sa.Column("last_error", sa.Text),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("settled_at", UtcTime),
    sa.Index("ix_deliveries_id", "id"),
    sa.Index("ix_deliveries_event_id", "event_id"),
    # The queue of each endpoint, and the urgent deliveries of a run to an endpoint.
    partial_index("ix_deliveries_endpoint_id", "endpoint_id", "due_at", "id", where="state = 'waiting'"),
    partial_index("ix_deliveries_endpoint_id_run_id", "endpoint_id", "run_id", "id", where="state = 'waiting'"),
)

delivery_attempts = sa.Table(
    "delivery_attempts",
    metadata,
    *part_of("deliveries", "delivery_id", primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", UtcTime, nullable=False),
    sa.Column("duration_ms", sa.Double, nullable=False),
    sa.Column("status_code", sa.Integer),
    sa.Column("error", sa.Text),
    sa.Column("url", sa.Text),  # where it was sent; the endpoint may have changed since
    sa.Column("answer", sa.Text),  # the start of the response body
)
