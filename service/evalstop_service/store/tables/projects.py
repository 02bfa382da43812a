"""Projects, rows that belong to a project rather than to one of its runs, and webhooks."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_origin
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.confidence_sequences import StageNumbers
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.project_settings import Declared, list_settings
from evalstop_service.domain.proposals import Approval, ProposalKind, ProposalState
from evalstop_service.domain.quotas import Quotas
from evalstop_service.domain.statuses import DeliveryState, Stage
from evalstop_service.domain.times import StopHours
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

_TYPES: dict[Any, sa.types.TypeEngine[Any]] = {
    str: sa.Text(),
    Mode: EnumText(Mode),
    bool: sa.Boolean(),
    int: sa.Integer(),
    float: sa.Double(),
    list[str]: sa.JSON(none_as_null=True),
    StopHours: StructJson(StopHours),
}


def _make_column(declared: Declared) -> sa.Column[Any]:
    (kind,) = (kind for kind in (get_args(declared.bare) or (declared.bare,)) if kind is not NoneType)
    kind = declared.bare if get_origin(declared.bare) is list else kind
    return sa.Column(declared.name, _TYPES[kind], nullable=declared.is_nullable)


projects = sa.Table(
    "projects",
    metadata,
    own_id(primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    *map(_make_column, list_settings()),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("paused_at", UtcTime),  # not NULL: nothing is stopped until it is resumed
    sa.Column("paused_by", sa.Text),
    sa.Column("paused_reason", sa.Text),
    sa.Column("paused_until", UtcTime),  # when it resumes by itself; NULL: when a person resumes it
    sa.Column("seed", sa.Text, nullable=False, server_default=""),  # of all random choices in the project
    sa.Column("quotas", StructJson(Quotas), nullable=False, server_default="{}"),  # missing quotas have their defaults
)

keys = sa.Table(
    "keys",
    metadata,
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), index=True),  # NULL: the whole installation
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.Column("scopes", StructJson(tuple[str, ...]), nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("revoked_at", UtcTime),
    sa.Column("expires_at", UtcTime),  # NULL: never
    sa.Column("last_used_at", UtcTime),  # to the hour
    sa.Column("networks", StructJson(tuple[str, ...]), nullable=False),  # from which it is accepted; empty: any
    sa.Column("endpoint_ids", StructJson(tuple[UUID, ...]), nullable=False),  # whose stops it reports on; empty: all
    sa.Column("previous_hash", sa.Text, unique=True),  # of the secret before it was rotated
    sa.Column("previous_until", UtcTime),
)

# Hashes of earlier secrets of rotated keys, which the spools of clients may name.
retired_key_hashes = sa.Table(
    "retired_key_hashes",
    metadata,
    sa.Column("hash", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
)

# Users signed in to the dashboard: by a key, or by an OpenID Connect issuer, whose grants map project names to
# roles.
sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("hash", sa.Text, primary_key=True),
    own_id(unique=True, nullable=False),
    sa.Column("key_id", sa.Uuid),  # NULL: signed in by OpenID Connect
    sa.Column("issuer", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("grants", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("expires_at", UtcTime, nullable=False, index=True),
)

policies = sa.Table(
    "policies",
    metadata,
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.UniqueConstraint("project_id", "name", "version"),
)

# How much a policy may do by itself in a project, by its measured precision; no row: only its runs' mode counts.
rollout_stages = sa.Table(
    "rollout_stages",
    metadata,
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), primary_key=True),
    sa.Column("policy_name", sa.Text, primary_key=True),
    sa.Column("stage", EnumText(Stage), nullable=False),
    sa.Column("required_precision", sa.Double, nullable=False),  # which the lower confidence bound has to pass
    sa.Column("canary_share", sa.Double, nullable=False),  # share of its stops that a canary carries out
    sa.Column("since", UtcTime, nullable=False),
    sa.Column("numbers", StructJson(StageNumbers), nullable=False),  # behind its stage
    sa.Column("version", sa.Integer, nullable=False),  # of the policy that earned it
)

# Proposals that wait for confirmation, and what became of them.
proposals = sa.Table(
    "proposals",
    metadata,
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), primary_key=True),
    own_id(primary_key=True),
    sa.Column("kind", EnumText(ProposalKind), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("summary", sa.Text, nullable=False),
    sa.Column("argument", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("proposed_by", sa.Text, nullable=False),
    sa.Column("approvals", StructJson(tuple[Approval, ...]), nullable=False),
    sa.Column("state", EnumText(ProposalState), nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("closed_at", UtcTime),
    partial_index("uq_proposals_open", "project_id", "kind", "subject", where="state = 'open'", unique=True),
)

# What people and keys did, written in the same transaction. Chained a moment later: until then the last three are NULL.
audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("project_id", sa.Uuid, primary_key=True),
    own_id(primary_key=True),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("at", UtcTime, nullable=False),
    sa.Column("position", sa.BigInteger),  # in its project's chain, from 1 on
    sa.Column("previous_hash", sa.Text),
    sa.Column("hash", sa.Text),
    sa.UniqueConstraint("project_id", "position"),
    partial_index("ix_audit_log_waiting", "project_id", "id", where="position IS NULL"),
)

# The end of each project's chain. A transaction that appends to the chain locks this row.
audit_chains = sa.Table(
    "audit_chains",
    metadata,
    sa.Column("project_id", sa.Uuid, primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
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
