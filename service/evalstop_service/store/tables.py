"""The tables. Every table that grows carries the run's id first in its key, so that it can be spread by run."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from evalstop_service.store.ids import new_id

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)


class UtcTime(sa.TypeDecorator[datetime]):
    """A moment in UTC; SQLite forgets the zone, so it is put back."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def moment_text(moment: datetime) -> str:
    """A moment as SQLite holds it."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


class Real(sa.TypeDecorator[float]):
    """A double that may be NaN. SQLite turns NaN into NULL by itself, so NULL stands for NaN in both databases."""

    impl = sa.Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: sa.Dialect) -> float | None:
        return None if value is None or math.isnan(value) else value

    def process_result_value(self, value: float | None, dialect: sa.Dialect) -> float:
        return math.nan if value is None else value


def _id(**options: Any) -> sa.Column[Any]:
    return sa.Column("id", sa.Uuid, **options)


def _run_id() -> sa.Column[Any]:
    return sa.Column("run_id", sa.Uuid, sa.ForeignKey("runs.id"), primary_key=True)


def _part_of(parent: str, column: str, **options: Any) -> tuple[sa.schema.SchemaItem, ...]:
    """The key of a row that belongs to a row of `parent`: the run's id and, called `column`, the parent's."""
    return (
        sa.Column("run_id", sa.Uuid, primary_key=True),
        sa.Column(column, sa.Uuid, **options),
        sa.ForeignKeyConstraint(["run_id", column], [f"{parent}.run_id", f"{parent}.id"]),
    )


projects = sa.Table(
    "projects",
    metadata,
    _id(primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("default_policy", sa.Text, nullable=False),
    sa.Column("default_mode", sa.Text, nullable=False),
    sa.Column("grace_seconds", sa.Double, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("retention_days", sa.Integer),  # NULL: the details of its runs are kept for ever
    sa.Column("paused_at", UtcTime),  # not NULL: nothing is stopped until somebody says so
    sa.Column("paused_by", sa.Text),
    sa.Column("paused_reason", sa.Text),
    # The blast radius: at most so many stops an hour, and of the running runs at most this share; NULL: no bound.
    sa.Column("stops_per_hour", sa.Integer, server_default="30"),
    sa.Column("stops_share", sa.Double, server_default="0.5"),
    sa.Column("confirm_seconds", sa.Double, nullable=False, server_default="900"),  # then a stop is escalated
    sa.Column("stale_seconds", sa.Double, nullable=False, server_default="300"),  # no run is stale before
    sa.Column("seed", sa.Text, nullable=False, server_default=""),  # of all that is left to chance in it
    sa.Column("held_out_share", sa.Double, nullable=False, server_default="0"),  # of its stops: let run, to learn
    sa.Column("price_per_gpu_hour", sa.Double),  # NULL: not said
    sa.Column("currency", sa.Text, nullable=False, server_default="USD"),
    sa.Column("role_patterns", sa.JSON, nullable=False, server_default="[]"),  # the first that fits a metric's name
)

keys = sa.Table(
    "keys",
    metadata,
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), index=True),  # NULL: the whole installation
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("revoked_at", UtcTime),
)

policies = sa.Table(
    "policies",
    metadata,
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.UniqueConstraint("project_id", "name", "version"),
)

runs = sa.Table(
    "runs",
    metadata,
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("policy_id", sa.Uuid, sa.ForeignKey("policies.id"), nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("total_steps", sa.BigInteger),
    sa.Column("last_step", sa.BigInteger),
    sa.Column("version", sa.Integer, nullable=False),  # counts the changes of the row
    # The version at which the past last changed: a monitor kept at an earlier one has to be rebuilt.
    sa.Column("rewritten_version", sa.Integer, nullable=False, server_default="0"),
    sa.Column("monitor_state", sa.Text),  # not NULL: written by release 0.1.0, which knows no other place for it
    sa.Column("verdict", sa.JSON, nullable=False),
    sa.Column("best_checkpoint", sa.JSON(none_as_null=True)),
    sa.Column("raw_maximum", sa.JSON(none_as_null=True)),
    sa.Column("turn", sa.JSON(none_as_null=True)),  # told with hindsight once the run has ended
    sa.Column("recognition", sa.JSON(none_as_null=True)),  # how its metrics got their roles; NULL: its trainer said so
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("updated_at", UtcTime, nullable=False),
    sa.Column("ended_at", UtcTime),
    sa.Column("pruned_at", UtcTime),  # since then its details are gone, or on their way
    sa.UniqueConstraint("project_id", "name"),
    sa.Index("ix_runs_project_id_id", "project_id", "id"),
    sa.Index("ix_runs_project_id_status_id", "project_id", "status", "id"),
    sa.Index(
        "ix_runs_project_id_ended_at",
        "project_id",
        "ended_at",
        sqlite_where=sa.text("pruned_at IS NULL"),
        postgresql_where=sa.text("pruned_at IS NULL"),
    ),
)

# The runs whose details are being removed: a row until the last of them is gone, so that what broke off goes on.
prunings = sa.Table(
    "prunings",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("begun_at", UtcTime, nullable=False),
)

# A cache of what can be rebuilt from the observations; it may lag behind the run. The run's row is locked by whoever
# writes here, as with observations, so that neither needs a foreign key.
monitors = sa.Table(
    "monitors",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("kept_at", UtcTime, nullable=False),
)

# Whether a run is alive, as far as its posts and heartbeats tell; ingestion does not write here.
pulses = sa.Table(
    "pulses",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("project_id", sa.Uuid, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("look_at", UtcTime),  # NULL: the run has ended
    sa.Column("heartbeat_at", UtcTime),
    sa.Column("cadence_seconds", sa.Double),  # learnt: between two posts
    sa.Column("dead", sa.JSON, nullable=False),  # the metrics that tell its detectors nothing, and why
    sa.Column("changed_at", UtcTime, nullable=False),
    sa.Index(
        "ix_pulses_look_at",
        "look_at",
        sqlite_where=sa.text("look_at IS NOT NULL"),
        postgresql_where=sa.text("look_at IS NOT NULL"),
    ),
)

attempts = sa.Table(
    "attempts",
    metadata,
    _run_id(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("resumed_from_step", sa.BigInteger),
    sa.Column("started_at", UtcTime, nullable=False),
)

# The identity of a live observation is (run, metric, step): `superseded_by` is 0 for it, and for a superseded one the
# attempt that took its place, so that the key itself keeps an identity from being counted twice.
observations = sa.Table(
    "observations",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("metric", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("superseded_by", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("value", Real),
    sa.Column("stderr", sa.Double),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("observed_at", UtcTime),
    sa.Column("received_at", UtcTime, nullable=False),
    postgresql_partition_by="HASH (run_id)",
)

# What `store.series` summarizes: neighboring live observations, so many a row.
series_buckets = sa.Table(
    "series_buckets",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("metric", sa.Text, primary_key=True),
    sa.Column("last_step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("first_step", sa.BigInteger, nullable=False),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("lowest", sa.Double),
    sa.Column("highest", sa.Double),
    sa.Column("last", Real),
    sa.Column("nan_count", sa.Integer, nullable=False),
    sa.Column("infinite_count", sa.Integer, nullable=False),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    _run_id(),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("superseded_by", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("uri", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
)

verdicts = sa.Table(
    "verdicts",
    metadata,
    _run_id(),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("at", UtcTime, nullable=False),
)

decisions = sa.Table(
    "decisions",
    metadata,
    _run_id(),
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("verdict", sa.JSON, nullable=False),
    sa.Column("best_checkpoint", sa.JSON(none_as_null=True)),
    sa.Column("policy_id", sa.Uuid, sa.ForeignKey("policies.id"), nullable=False),
    sa.Column("due_at", UtcTime, nullable=False),  # the end of the grace period
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("deadline_at", UtcTime),  # when the service has to look after it by itself; NULL: never
    sa.Column("escalations", sa.Integer, nullable=False, server_default="0"),
    sa.Column("observed_probability", sa.Double),  # of being let run, so that the truth is seen; NULL: release 0.1.0
    sa.UniqueConstraint("run_id", "attempt"),  # one decision an attempt: whoever comes second changes nothing
    sa.Index("ix_decisions_id", "id"),
    sa.Index("ix_decisions_project_id_id", "project_id", "id"),
    sa.Index("ix_decisions_project_id_due_at", "project_id", "due_at"),  # how many there were within an hour
    sa.Index(
        "ix_decisions_due_at",
        "due_at",
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    ),
    sa.Index(
        "ix_decisions_deadline_at",
        "deadline_at",
        sqlite_where=sa.text("deadline_at IS NOT NULL"),
        postgresql_where=sa.text("deadline_at IS NOT NULL"),
    ),
)

decision_changes = sa.Table(
    "decision_changes",
    metadata,
    *_part_of("decisions", "decision_id", primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("at", UtcTime, nullable=False),
)

# What turned out to be true of an attempt, whether or not it was flagged: the last row counts.
outcomes = sa.Table(
    "run_outcomes",
    metadata,
    _run_id(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("turn_step", sa.BigInteger),
    sa.Column("derived", sa.Boolean, nullable=False),  # from later evals; else a person said so
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),  # the numbers behind it
    sa.Column("at", UtcTime, nullable=False),
)

# Release 0.1.0 keeps outcomes here; nothing else does, and the next release may drop it.
former_outcomes = sa.Table(
    "outcomes",
    metadata,
    *_part_of("decisions", "decision_id", primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("turn_step", sa.BigInteger),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("at", UtcTime, nullable=False),
)

# An attempt that has ended, in one row: what was decided, what was true, what it cost. Made of the rows above; all that
# is estimated is counted here.
cases = sa.Table(
    "cases",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("project_id", sa.Uuid, nullable=False),
    sa.Column("policy_id", sa.Uuid, nullable=False),
    sa.Column("job_kind", sa.Text),
    sa.Column("gpus", sa.Double),
    sa.Column("truth", sa.Text, nullable=False),  # turned, healthy, undecided
    sa.Column("derived", sa.Boolean, nullable=False),
    sa.Column("turn_step", sa.BigInteger),
    sa.Column("decision_id", sa.Uuid),  # NULL: never flagged, as is all that follows of the decision
    sa.Column("treatment", sa.Text),  # let_run (shadow, held out), stopped, prevented (vetoed, moot, withheld, undone)
    sa.Column("observed_probability", sa.Double),
    sa.Column("decided_step", sa.BigInteger),
    sa.Column("detectors", sa.JSON(none_as_null=True)),  # those that called for the stop
    sa.Column("stated_risk", sa.Double),  # the share of healthy runs that the policy says it stops
    sa.Column("outcome", sa.Text, nullable=False),  # right, wrong, unknown
    sa.Column("delay_steps", sa.BigInteger),  # from the turn to the decision
    sa.Column("gpu_hours", sa.Double),  # of the whole attempt; NULL: nobody said how many GPUs it has
    sa.Column("gpu_hours_saved", sa.Double),  # by a stop, estimated by its pace; of one that was let run, measured
    sa.Column("gpu_hours_lost", sa.Double),  # by a stop that was wrong
    sa.Column("ended_at", UtcTime, nullable=False),
    sa.Column("revision", sa.Uuid, nullable=False, default=new_id),  # another whenever the row is made anew
    sa.Index("ix_cases_project_id_ended_at", "project_id", "ended_at", "run_id"),
    sa.Index("ix_cases_project_id_revision", "project_id", "revision"),
    sa.Index(  # the few that were flagged; and all others, in an index so small that it is read whole
        "ix_cases_flagged",
        "project_id",
        "policy_id",
        "ended_at",
        sqlite_where=sa.text("decision_id IS NOT NULL"),
        postgresql_where=sa.text("decision_id IS NOT NULL"),
    ),
    sa.Index(
        "ix_cases_passed",
        "project_id",
        "policy_id",
        "outcome",
        sqlite_where=sa.text("decision_id IS NULL"),
        postgresql_where=sa.text("decision_id IS NULL"),
    ),
)

# How much a policy may do by itself in a project, by what it has shown; no row: as much as its runs' mode says.
authorities = sa.Table(
    "authorities",
    metadata,
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), primary_key=True),
    sa.Column("policy_name", sa.Text, primary_key=True),
    sa.Column("stage", sa.Text, nullable=False),  # shadow, canary, enforce
    sa.Column("precision_wanted", sa.Double, nullable=False),  # the lower bound has to pass it
    sa.Column("canary_share", sa.Double, nullable=False),  # of its stops, while it is a canary
    sa.Column("since", UtcTime, nullable=False),
    sa.Column("numbers", sa.JSON, nullable=False),  # by which it came to its stage
    sa.Column("version", sa.Integer, nullable=False),  # of the policy that has shown it
)

# A policy tried on the runs of the past, before it is let loose.
rehearsals = sa.Table(
    "rehearsals",
    metadata,
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("most_runs", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),  # waiting, running, done, failed
    sa.Column("total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("done", sa.Integer, nullable=False, server_default="0"),
    sa.Column("findings", sa.JSON, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("lease_until", UtcTime),  # while a worker is at it
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("ended_at", UtcTime),
    sa.Index("ix_rehearsals_project_id_id", "project_id", "id"),
)

# What people and keys changed, in the transaction that changed it.
audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("project_id", sa.Uuid, primary_key=True),
    _id(primary_key=True),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("at", UtcTime, nullable=False),
)

# Who signed in by somebody else's word (OpenID Connect), and what they may do: project name -> role.
sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("hash", sa.Text, primary_key=True),
    sa.Column("issuer", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("grants", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("expires_at", UtcTime, nullable=False, index=True),
)

# What clients of MLflow call their runs' folders; of a run its label `mlflow.experiment` tells the name.
experiments = sa.Table(
    "experiments",
    metadata,
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.UniqueConstraint("project_id", "name"),
)

endpoints = sa.Table(
    "endpoints",
    metadata,
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False, index=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("event_types", sa.JSON, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("previous_secret", sa.Text),
    sa.Column("previous_secret_until", UtcTime),
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("deleted_at", UtcTime),
    sa.Column("format", sa.Text, nullable=False, server_default="standard"),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),  # one after the other, up to now
    sa.Column("open_until", UtcTime),  # the circuit breaker: nothing is sent before
)

events = sa.Table(
    "events",
    metadata,
    _run_id(),
    _id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("decision_id", sa.Uuid),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # the bytes that are signed, so that every attempt sends the same
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Index("ix_events_project_id_id", "project_id", "id"),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    *_part_of("events", "event_id", nullable=False),
    _id(primary_key=True),
    sa.Column("endpoint_id", sa.Uuid, sa.ForeignKey("endpoints.id"), nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("due_at", UtcTime, nullable=False),  # while a worker holds it: the end of its lease
    sa.Column("urgent", sa.Boolean, nullable=False, server_default=sa.false()),  # overtakes what is not, of its run
    sa.Column("last_error", sa.Text),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("settled_at", UtcTime),
    sa.Index("ix_deliveries_id", "id"),
    sa.Index("ix_deliveries_event_id", "event_id"),
    sa.Index(  # the queue of each endpoint, from its head
        "ix_deliveries_endpoint_id",
        "endpoint_id",
        "due_at",
        "id",
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    ),
    sa.Index(  # what goes first, of a run to an endpoint
        "ix_deliveries_endpoint_id_run_id",
        "endpoint_id",
        "run_id",
        "id",
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    ),
)

delivery_attempts = sa.Table(
    "delivery_attempts",
    metadata,
    *_part_of("deliveries", "delivery_id", primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", UtcTime, nullable=False),
    sa.Column("duration_ms", sa.Double, nullable=False),
    sa.Column("status_code", sa.Integer),
    sa.Column("error", sa.Text),
    sa.Column("url", sa.Text),  # where it was sent, which the endpoint may have changed since
    sa.Column("answer", sa.Text),  # how its body began
)
