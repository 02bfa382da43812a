"""What proves a stop: deadlines for its confirmation, bounds on how many there may be, and whether its run is alive."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
deploy = "before"

BY_DEADLINE = "ix_decisions_deadline_at"
BY_LOOK = "ix_pulses_look_at"
BY_PROJECT = "ix_events_project_id_id"
BY_RUN = "ix_deliveries_endpoint_id_run_id"
BY_HOUR = "ix_decisions_project_id_due_at"


def _added() -> dict[str, list[sa.Column[Any]]]:
    """The new columns by their table; whatever release 0.1.0 writes gets the server's defaults."""
    return {
        "projects": [
            sa.Column("paused_at", sa.DateTime(timezone=True), nullable=True),
            sa.Column("paused_by", sa.Text(), nullable=True),
            sa.Column("paused_reason", sa.Text(), nullable=True),
            sa.Column("stops_per_hour", sa.Integer(), nullable=True, server_default="30"),
            sa.Column("stops_share", sa.Double(), nullable=True, server_default="0.5"),
            sa.Column("confirm_seconds", sa.Double(), nullable=False, server_default="900"),
            sa.Column("stale_seconds", sa.Double(), nullable=False, server_default="300"),
        ],
        "decisions": [
            sa.Column("escalations", sa.Integer(), nullable=False, server_default="0"),
        ],
        "endpoints": [
            sa.Column("format", sa.Text(), nullable=False, server_default="standard"),
            sa.Column("failures", sa.Integer(), nullable=False, server_default="0"),
            sa.Column("open_until", sa.DateTime(timezone=True), nullable=True),
        ],
        "deliveries": [
            sa.Column("urgent", sa.Boolean(), nullable=False, server_default=sa.false()),
        ],
        "delivery_attempts": [
            sa.Column("url", sa.Text(), nullable=True),
            sa.Column("answer", sa.Text(), nullable=True),
        ],
    }


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        with op.get_context().autocommit_block():  # without a lock that trainers would wait for; may be begun again
            op.execute("ALTER TABLE decisions ADD COLUMN IF NOT EXISTS deadline_at TIMESTAMP WITH TIME ZONE")
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {BY_DEADLINE}")
            op.execute(
                f"CREATE INDEX CONCURRENTLY {BY_DEADLINE} ON decisions (deadline_at) WHERE deadline_at IS NOT NULL"
            )
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {BY_PROJECT}")
            op.execute(f"CREATE INDEX CONCURRENTLY {BY_PROJECT} ON events (project_id, id)")
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {BY_RUN}")
            op.execute(
                f"CREATE INDEX CONCURRENTLY {BY_RUN} ON deliveries (endpoint_id, run_id, id) WHERE state = 'waiting'"
            )
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {BY_HOUR}")
            op.execute(f"CREATE INDEX CONCURRENTLY {BY_HOUR} ON decisions (project_id, due_at)")
    else:
        op.add_column("decisions", sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True))
        op.create_index(BY_DEADLINE, "decisions", ["deadline_at"], sqlite_where=sa.text("deadline_at IS NOT NULL"))
        op.create_index(BY_PROJECT, "events", ["project_id", "id"])
        op.create_index(
            BY_RUN, "deliveries", ["endpoint_id", "run_id", "id"], sqlite_where=sa.text("state = 'waiting'")
        )
        op.create_index(BY_HOUR, "decisions", ["project_id", "due_at"])
    for table, columns in _added().items():
        for column in columns:
            op.add_column(table, column)
    op.create_table(
        "pulses",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("look_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cadence_seconds", sa.Double(), nullable=True),
        sa.Column("dead", sa.JSON(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_pulses"),
    )
    op.create_index(
        BY_LOOK,
        "pulses",
        ["look_at"],
        sqlite_where=sa.text("look_at IS NOT NULL"),
        postgresql_where=sa.text("look_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index(BY_DEADLINE, "decisions")
    op.drop_index(BY_PROJECT, "events")
    op.drop_index(BY_RUN, "deliveries")
    op.drop_index(BY_HOUR, "decisions")
    op.drop_table("pulses")
    for table, columns in reversed(_added().items()):
        for column in columns:
            op.drop_column(table, column.name)
    op.drop_column("decisions", "deadline_at")
