"""Whether it was right: what turned out to be true, of every attempt, and what people did about it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None
deploy = "before"

_COPY = """
INSERT INTO run_outcomes (run_id, attempt, sequence, outcome, turn_step, derived, actor, note, details, at)
SELECT o.run_id, d.attempt, o.sequence, o.outcome, o.turn_step, {false}, o.actor, o.note, '{{}}', o.at
FROM outcomes AS o JOIN decisions AS d ON d.run_id = o.run_id AND d.id = o.decision_id
"""


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _added() -> dict[str, list[sa.Column[Any]]]:
    """The new columns by their table; whatever release 0.1.0 writes gets the server's defaults."""
    return {
        "projects": [
            sa.Column("seed", sa.Text(), nullable=False, server_default=""),
            sa.Column("held_out_share", sa.Double(), nullable=False, server_default="0"),
            sa.Column("price_per_gpu_hour", sa.Double(), nullable=True),
            sa.Column("currency", sa.Text(), nullable=False, server_default="USD"),
            sa.Column("role_patterns", sa.JSON(), nullable=False, server_default="[]"),
        ],
        "decisions": [
            sa.Column("observed_probability", sa.Double(), nullable=True),
        ],
        "runs": [
            sa.Column("recognition", sa.JSON(), nullable=True),
        ],
    }


def upgrade() -> None:
    for table, columns in _added().items():
        for column in columns:
            op.add_column(table, column)
    _make_outcomes()
    _make_cases()
    op.create_table(
        "authorities",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("policy_name", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("precision_wanted", sa.Double(), nullable=False),
        sa.Column("canary_share", sa.Double(), nullable=False),
        _time("since"),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "policy_name", name="pk_authorities"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_authorities_project_id"),
    )
    op.create_table(
        "rehearsals",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("most_runs", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("done", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        _time("lease_until", nullable=True),
        _time("created_at"),
        _time("ended_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_rehearsals"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_rehearsals_project_id"),
    )
    op.create_index("ix_rehearsals_project_id_id", "rehearsals", ["project_id", "id"])
    op.create_table(
        "audit_log",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        _time("at"),
        sa.PrimaryKeyConstraint("project_id", "id", name="pk_audit_log"),
    )
    op.create_table(
        "sessions",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("grants", sa.JSON(), nullable=False),
        _time("created_at"),
        _time("expires_at"),
        sa.PrimaryKeyConstraint("hash", name="pk_sessions"),
    )
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])
    op.create_table(
        "experiments",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        _time("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_experiments"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_experiments_project_id"),
        sa.UniqueConstraint("project_id", "name", name="uq_experiments_project_id"),
    )


def _make_outcomes() -> None:
    op.create_table(
        "run_outcomes",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("turn_step", sa.BigInteger(), nullable=True),
        sa.Column("derived", sa.Boolean(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        _time("at"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "sequence", name="pk_run_outcomes"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_outcomes_run_id"),
    )
    false = "false" if op.get_context().dialect.name == "postgresql" else "0"
    op.execute(_COPY.format(false=false))


def _make_cases() -> None:
    op.create_table(
        "cases",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=False),
        sa.Column("job_kind", sa.Text(), nullable=True),
        sa.Column("gpus", sa.Double(), nullable=True),
        sa.Column("truth", sa.Text(), nullable=False),
        sa.Column("derived", sa.Boolean(), nullable=False),
        sa.Column("turn_step", sa.BigInteger(), nullable=True),
        sa.Column("decision_id", sa.Uuid(), nullable=True),
        sa.Column("treatment", sa.Text(), nullable=True),
        sa.Column("observed_probability", sa.Double(), nullable=True),
        sa.Column("decided_step", sa.BigInteger(), nullable=True),
        sa.Column("detectors", sa.JSON(), nullable=True),
        sa.Column("stated_risk", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("delay_steps", sa.BigInteger(), nullable=True),
        sa.Column("gpu_hours", sa.Double(), nullable=True),
        sa.Column("gpu_hours_saved", sa.Double(), nullable=True),
        sa.Column("gpu_hours_lost", sa.Double(), nullable=True),
        _time("ended_at"),
        sa.Column("revision", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name="pk_cases"),
    )
    op.create_index("ix_cases_project_id_ended_at", "cases", ["project_id", "ended_at", "run_id"])
    op.create_index("ix_cases_project_id_revision", "cases", ["project_id", "revision"])
    flagged, passed = sa.text("decision_id IS NOT NULL"), sa.text("decision_id IS NULL")
    op.create_index(
        "ix_cases_flagged",
        "cases",
        ["project_id", "policy_id", "ended_at"],
        sqlite_where=flagged,
        postgresql_where=flagged,
    )
    op.create_index(
        "ix_cases_passed",
        "cases",
        ["project_id", "policy_id", "outcome"],
        sqlite_where=passed,
        postgresql_where=passed,
    )


def downgrade() -> None:
    for table in ("experiments", "sessions", "audit_log", "rehearsals", "authorities", "cases", "run_outcomes"):
        op.drop_table(table)
    for table, columns in reversed(_added().items()):
        for column in columns:
            op.drop_column(table, column.name)
