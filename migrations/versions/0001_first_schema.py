"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

PARTITIONS = 16

TABLES = (
    "delivery_attempts",
    "deliveries",
    "decision_changes",
    "verdicts",
    "outcomes",
    "events",
    "decisions",
    "checkpoints",
    "eval_requests",
    "attempts",
    "mlflow_runs",
    "run_descriptions",
    "runs",
    "rollout_stages",
    "proposals",
    "policies",
    "keys",
    "experiments",
    "endpoints",
    "backtests",
    "sessions",
    "run_health",
    "run_deletions",
    "running_runs",
    "projects",
    "observations",
    "monitor_states",
    "case_calls",
    "cases",
    "audit_log",
    "audit_chains",
    "veto_listeners",
)
"""In an order in which each is dropped before those that it refers to."""


def upgrade() -> None:
    """Create every table; on PostgreSQL observations are partitioned by run."""
    bind = op.get_bind()
    _create_projects()
    _create_runs()
    _create_decisions()
    _create_webhooks()
    if bind.dialect.name != "postgresql":
        return
    for number in range(PARTITIONS):
        op.execute(
            f"CREATE TABLE observations_p{number:02} PARTITION OF observations"
            f" FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {number})"
        )
    # Room on each page for the next version of a row, so that an update leaves the indices alone.
    op.execute("ALTER TABLE runs SET (fillfactor = 50)")
    op.execute("ALTER TABLE monitor_states SET (fillfactor = 50)")
    # What was delivered lies dead at the head of its queue until a vacuum: a share of the whole table is too late.
    op.execute("ALTER TABLE deliveries SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000)")
    _index_parts_of_names()


def downgrade() -> None:
    """Drop every table."""
    for table in TABLES:
        op.drop_table(table)


def _index_parts_of_names() -> None:
    """Where the extension is at hand; elsewhere a search for a rare part of a name reads all runs of the project."""
    offered = "SELECT 1 FROM pg_available_extensions WHERE name = 'pg_trgm'"
    allowed = "SELECT has_database_privilege(current_database(), 'CREATE')"
    there = "SELECT 1 FROM pg_extension WHERE extname = 'pg_trgm'"
    bind = op.get_bind()

    def holds(query: str) -> bool:
        return bool(bind.exec_driver_sql(query).scalar())

    if holds(there) or (holds(offered) and holds(allowed)):
        op.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")
        op.execute("CREATE INDEX ix_runs_name_trigrams ON runs USING gin (name gin_trgm_ops)")


def _create_projects() -> None:
    op.create_table(
        "audit_log",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=True),
        sa.Column("previous_hash", sa.Text(), nullable=True),
        sa.Column("hash", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("project_id", "id", name=op.f("pk_audit_log")),
        sa.UniqueConstraint("project_id", "position", name=op.f("uq_audit_log_project_id")),
    )
    op.create_index(
        "ix_audit_log_waiting",
        "audit_log",
        ["project_id", "id"],
        postgresql_where=sa.text("position IS NULL"),
        sqlite_where=sa.text("position IS NULL"),
    )
    op.create_table(
        "audit_chains",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_audit_chains")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("default_policy", sa.Text(), nullable=False),
        sa.Column("default_mode", sa.Text(), nullable=False),
        sa.Column("max_mode", sa.Text(), nullable=False),
        sa.Column("allowed_policies", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("panel", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("veto_window_seconds", sa.Double(), nullable=False),
        sa.Column("stop_hours", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("act_from_messages", sa.Boolean(), nullable=False),
        sa.Column("confirm_seconds", sa.Double(), nullable=False),
        sa.Column("second_person", sa.Boolean(), nullable=False),
        sa.Column("held_out_share", sa.Double(), nullable=False),
        sa.Column("stops_per_hour", sa.Integer(), nullable=True),
        sa.Column("stops_share", sa.Double(), nullable=True),
        sa.Column("stale_seconds", sa.Double(), nullable=False),
        sa.Column("case_seconds", sa.Double(), nullable=False),
        sa.Column("case_evals", sa.Integer(), nullable=False),
        sa.Column("cases_per_key_and_day", sa.Integer(), nullable=False),
        sa.Column("retention_days", sa.Integer(), nullable=True),
        sa.Column("rules", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("paused_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paused_by", sa.Text(), nullable=True),
        sa.Column("paused_reason", sa.Text(), nullable=True),
        sa.Column("paused_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("seed", sa.Text(), server_default="", nullable=False),
        sa.Column("quotas", sa.JSON(none_as_null=True), server_default="{}", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
    )
    op.create_table(
        "sessions",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=True),
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("grants", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_sessions")),
        sa.UniqueConstraint("id", name=op.f("uq_sessions_id")),
    )
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("networks", sa.JSON(), nullable=False),
        sa.Column("endpoint_ids", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_keys_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_keys_hash")),
    )
    op.create_index(op.f("ix_keys_project_id"), "keys", ["project_id"], unique=False)
    op.create_table(
        "policies",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_policies_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
        sa.UniqueConstraint("project_id", "name", "version", name=op.f("uq_policies_project_id")),
    )
    op.create_table(
        "rollout_stages",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("required_precision", sa.Double(), nullable=False),
        sa.Column("canary_share", sa.Double(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_rollout_stages_project_id")),
        sa.PrimaryKeyConstraint("project_id", "policy_name", name=op.f("pk_rollout_stages")),
    )
    op.create_table(
        "proposals",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("argument", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("proposed_by", sa.Text(), nullable=False),
        sa.Column("approvals", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_proposals_project_id")),
        sa.PrimaryKeyConstraint("project_id", "id", name=op.f("pk_proposals")),
    )
    op.create_index(
        "uq_proposals_open",
        "proposals",
        ["project_id", "kind", "subject"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )


def _create_runs() -> None:
    op.create_table(
        "monitor_states",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_monitor_states")),
    )
    op.create_table(
        "observations",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("metric", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("superseded_by", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("stderr", sa.Double(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("observed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "metric", "step", "superseded_by", name=op.f("pk_observations")),
        postgresql_partition_by="HASH (run_id)",
    )
    op.create_table(
        "run_deletions",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_deletions")),
    )
    op.create_table(
        "running_runs",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("may_have_turned", sa.Boolean(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=True),
        sa.Column("job_key", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_running_runs")),
    )
    op.create_index(
        "ix_running_runs_project_id_may_have_turned_run_id",
        "running_runs",
        ["project_id", "may_have_turned", "run_id"],
        unique=False,
    )
    op.create_table(
        "run_health",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("next_check_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cadence_seconds", sa.Double(), nullable=True),
        sa.Column("metric_faults", sa.JSON(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_health")),
    )
    op.create_index(
        "ix_run_health_next_check_at",
        "run_health",
        ["next_check_at"],
        unique=False,
        sqlite_where=sa.text("next_check_at IS NOT NULL"),
        postgresql_where=sa.text("next_check_at IS NOT NULL"),
    )
    op.create_table(
        "experiments",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("artifact_location", sa.Text(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_experiments_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiments")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_experiments_project_id")),
        sa.UniqueConstraint("project_id", "number", name="uq_experiments_number"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("total_steps", sa.BigInteger(), nullable=True),
        sa.Column("eval_share", sa.Double(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("rewritten_version", sa.Integer(), server_default="0", nullable=False),
        sa.Column("verdict", sa.JSON(), nullable=False),
        sa.Column("calls", sa.JSON(none_as_null=True), server_default="{}", nullable=False),
        sa.Column("best_checkpoint", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("raw_maximum", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("turn", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("recognition", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("eval_changes", sa.JSON(none_as_null=True), server_default="[]", nullable=False),
        sa.Column("detector_failure", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("pruned_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("opened_as", sa.Text(), nullable=True),
        sa.Column("job", sa.Text(), nullable=True),
        sa.Column("job_key", sa.Text(), nullable=True),
        sa.Column("opening", sa.Uuid(), nullable=True),
        sa.Column("opened_by", sa.Uuid(), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_runs_policy_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_runs_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_runs_project_id")),
    )
    op.create_index(
        "ix_runs_project_id_ended_at",
        "runs",
        ["project_id", "ended_at"],
        unique=False,
        sqlite_where=sa.text("pruned_at IS NULL"),
        postgresql_where=sa.text("pruned_at IS NULL"),
    )
    op.create_index(
        "ix_runs_project_id_opened_as",
        "runs",
        ["project_id", "opened_as"],
        unique=False,
        sqlite_where=sa.text("opened_as IS NOT NULL"),
        postgresql_where=sa.text("opened_as IS NOT NULL"),
    )
    op.create_index(
        "ix_runs_project_id_job_key",
        "runs",
        ["project_id", "job_key"],
        unique=False,
        sqlite_where=sa.text("job_key IS NOT NULL"),
        postgresql_where=sa.text("job_key IS NOT NULL"),
    )
    op.create_index(
        "uq_runs_project_id_opening",
        "runs",
        ["project_id", "opening"],
        unique=True,
        sqlite_where=sa.text("opening IS NOT NULL"),
        postgresql_where=sa.text("opening IS NOT NULL"),
    )
    op.create_index("ix_runs_project_id_id", "runs", ["project_id", "id"], unique=False)
    op.create_index("ix_runs_project_id_status_id", "runs", ["project_id", "status", "id"], unique=False)
    op.create_table(
        "mlflow_runs",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("experiment_id", sa.Uuid(), nullable=True),
        sa.Column("start_time", sa.BigInteger(), nullable=True),
        sa.Column("end_time", sa.BigInteger(), nullable=True),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name=op.f("fk_mlflow_runs_experiment_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_mlflow_runs_run_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_mlflow_runs")),
    )
    op.create_index("ix_mlflow_runs_experiment_id", "mlflow_runs", ["experiment_id"], unique=False)
    op.create_table(
        "run_descriptions",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("group", sa.Text(), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("step_notes", sa.JSON(none_as_null=True), server_default="[]", nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_run_descriptions_project_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_descriptions_run_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_descriptions")),
    )
    for column in ("owner", "group"):
        op.create_index(
            f"ix_run_descriptions_project_id_{column}",
            "run_descriptions",
            ["project_id", column, "run_id"],
            unique=False,
        )
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("resumed_from_step", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id")),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_attempts")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("superseded_by", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id")),
        sa.PrimaryKeyConstraint("run_id", "step", "superseded_by", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "eval_requests",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("multiplier", sa.Integer(), nullable=False),
        sa.Column("best_step", sa.BigInteger(), nullable=False),
        sa.Column("best_uri", sa.Text(), nullable=False),
        sa.Column("probability", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("answered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("actor", sa.Text(), nullable=True),
        sa.Column("difference", sa.Double(), nullable=True),
        sa.Column("stderr", sa.Double(), nullable=True),
        sa.Column("prompts", sa.Integer(), nullable=True),
        sa.Column("probability_after", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_eval_requests_project_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_eval_requests_run_id")),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", name=op.f("pk_eval_requests")),
    )
    op.create_index(
        "ix_eval_requests_project_id_deadline_at",
        "eval_requests",
        ["project_id", "deadline_at"],
        unique=False,
        sqlite_where=sa.text("answered_at IS NULL"),
        postgresql_where=sa.text("answered_at IS NULL"),
    )
    op.create_table(
        "verdicts",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_verdicts_run_id")),
        sa.PrimaryKeyConstraint("run_id", "sequence", name=op.f("pk_verdicts")),
    )


def _create_case_calls() -> None:
    op.create_table(
        "case_calls",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("detector", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("job_kind", sa.Text(), nullable=True),
        sa.Column("treatment", sa.Text(), nullable=True),
        sa.Column("observed_probability", sa.Double(), nullable=True),
        sa.Column("run_outcome", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("delay_steps", sa.BigInteger(), nullable=True),
        sa.Column("gpu_hours_after", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "attempt", "detector", name=op.f("pk_case_calls")),
    )
    op.create_index(
        "ix_case_calls_counted",
        "case_calls",
        [
            "project_id",
            "policy_name",
            "policy_version",
            "detector",
            "treatment",
            "observed_probability",
            "run_outcome",
            "outcome",
            "delay_steps",
            "gpu_hours_after",
            "ended_at",
            "job_kind",
        ],
        unique=False,
    )


def _create_decisions() -> None:
    op.create_table(
        "cases",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run_name", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("job_kind", sa.Text(), nullable=True),
        sa.Column("gpus", sa.Double(), nullable=True),
        sa.Column("run_outcome", sa.Text(), nullable=False),
        sa.Column("derived", sa.Boolean(), nullable=False),
        sa.Column("turn_step", sa.BigInteger(), nullable=True),
        sa.Column("decision_id", sa.Uuid(), nullable=True),
        sa.Column("treatment", sa.Text(), nullable=True),
        sa.Column("observed_probability", sa.Double(), nullable=True),
        sa.Column("decided_step", sa.BigInteger(), nullable=True),
        sa.Column("detectors", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("stated_risk", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("delay_steps", sa.BigInteger(), nullable=True),
        sa.Column("gpu_hours", sa.Double(), nullable=True),
        sa.Column("gpu_hours_saved", sa.Double(), nullable=True),
        sa.Column("gpu_hours_lost", sa.Double(), nullable=True),
        sa.Column("parked_seconds", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("evals", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revision", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_cases")),
    )
    op.create_index(
        "ix_cases_flagged",
        "cases",
        ["project_id", "policy_name", "policy_version", "ended_at"],
        unique=False,
        sqlite_where=sa.text("decision_id IS NOT NULL"),
        postgresql_where=sa.text("decision_id IS NOT NULL"),
    )
    op.create_index(
        "ix_cases_passed",
        "cases",
        ["project_id", "policy_name", "policy_version", "outcome"],
        unique=False,
        sqlite_where=sa.text("decision_id IS NULL"),
        postgresql_where=sa.text("decision_id IS NULL"),
    )
    op.create_index("ix_cases_project_id_ended_at", "cases", ["project_id", "ended_at", "run_id"], unique=False)
    op.create_index("ix_cases_project_id_revision", "cases", ["project_id", "revision"], unique=False)
    _create_case_calls()
    op.create_table(
        "backtests",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("most_runs", sa.Integer(), nullable=False),
        sa.Column("replayed", sa.Integer(), nullable=False),
        sa.Column("cut_short", sa.Boolean(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_backtests_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_backtests")),
    )
    op.create_index("ix_backtests_project_id_id", "backtests", ["project_id", "id"], unique=False)
    op.create_table(
        "decisions",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("action", sa.Text(), server_default="stop", nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("state_reason", sa.Text(), server_default="", nullable=False),
        sa.Column("guard_kinds", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("verdict", sa.JSON(), nullable=False),
        sa.Column("best_checkpoint", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("policy_id", sa.Uuid(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("run_name", sa.Text(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("escalations", sa.Integer(), server_default="0", nullable=False),
        sa.Column("handed_over_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("handed_over_to", sa.Text(), nullable=True),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("asked_by", sa.Text(), nullable=True),
        sa.Column("observed_probability", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_decisions_policy_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_decisions_project_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_decisions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_decisions")),
        sa.UniqueConstraint("run_id", "attempt", name=op.f("uq_decisions_run_id")),
    )
    op.create_index(
        "ix_decisions_deadline_at",
        "decisions",
        ["deadline_at"],
        unique=False,
        sqlite_where=sa.text("deadline_at IS NOT NULL"),
        postgresql_where=sa.text("deadline_at IS NOT NULL"),
    )
    op.create_index(
        "ix_decisions_due_at",
        "decisions",
        ["due_at"],
        unique=False,
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index("ix_decisions_id", "decisions", ["id"], unique=False)
    op.create_index(
        "ix_decisions_asked_at",
        "decisions",
        ["asked_at"],
        unique=False,
        sqlite_where=sa.text("asked_at IS NOT NULL AND handed_over_at IS NULL"),
        postgresql_where=sa.text("asked_at IS NOT NULL AND handed_over_at IS NULL"),
    )
    op.create_index(
        "ix_decisions_unsent",
        "decisions",
        ["run_id"],
        unique=False,
        sqlite_where=sa.text("handed_over_at IS NULL AND state IN ('pending', 'requested', 'escalated')"),
        postgresql_where=sa.text("handed_over_at IS NULL AND state IN ('pending', 'requested', 'escalated')"),
    )
    op.create_index("ix_decisions_project_id_due_at", "decisions", ["project_id", "due_at"], unique=False)
    op.create_index("ix_decisions_project_id_id", "decisions", ["project_id", "id"], unique=False)
    op.create_table(
        "veto_listeners",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("heard_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_veto_listeners")),
    )
    op.create_table(
        "outcomes",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("turn_step", sa.BigInteger(), nullable=True),
        sa.Column("derived", sa.Boolean(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("assessment", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_outcomes_run_id")),
        sa.PrimaryKeyConstraint("run_id", "attempt", "sequence", name=op.f("pk_outcomes")),
    )
    op.create_table(
        "decision_changes",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("decision_id", sa.Uuid(), nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "decision_id"], ["decisions.run_id", "decisions.id"], name=op.f("fk_decision_changes_run_id")
        ),
        sa.PrimaryKeyConstraint("run_id", "decision_id", "sequence", name=op.f("pk_decision_changes")),
    )


def _create_webhooks() -> None:
    op.create_table(
        "endpoints",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.JSON(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("previous_secret", sa.Text(), nullable=True),
        sa.Column("previous_secret_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("signing_key", sa.Text(), nullable=False),
        sa.Column("public_key", sa.Text(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("format", sa.Text(), server_default="standard", nullable=False),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("open_until", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_endpoints_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_endpoints")),
    )
    op.create_index(op.f("ix_endpoints_project_id"), "endpoints", ["project_id"], unique=False)
    op.create_table(
        "events",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("decision_id", sa.Uuid(), nullable=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_events_project_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id")),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_events")),
    )
    op.create_index("ix_events_project_id_id", "events", ["project_id", "id"], unique=False)
    op.create_table(
        "deliveries",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("event_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("endpoint_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("urgent", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoints.id"], name=op.f("fk_deliveries_endpoint_id")),
        sa.ForeignKeyConstraint(
            ["run_id", "event_id"], ["events.run_id", "events.id"], name=op.f("fk_deliveries_run_id")
        ),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_deliveries")),
    )
    op.create_index(
        "ix_deliveries_endpoint_id",
        "deliveries",
        ["endpoint_id", "due_at", "id"],
        unique=False,
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_index(
        "ix_deliveries_endpoint_id_run_id",
        "deliveries",
        ["endpoint_id", "run_id", "id"],
        unique=False,
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_index("ix_deliveries_event_id", "deliveries", ["event_id"], unique=False)
    op.create_index("ix_deliveries_id", "deliveries", ["id"], unique=False)
    op.create_table(
        "delivery_attempts",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("delivery_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "delivery_id"], ["deliveries.run_id", "deliveries.id"], name=op.f("fk_delivery_attempts_run_id")
        ),
        sa.PrimaryKeyConstraint("run_id", "delivery_id", "number", name=op.f("pk_delivery_attempts")),
    )
    # ### end Alembic commands ###
