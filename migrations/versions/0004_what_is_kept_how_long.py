"""For how long a project keeps the details of its runs, which runs have lost theirs, and which are losing them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
deploy = "before"

INDEX = "ix_runs_project_id_ended_at"


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        with op.get_context().autocommit_block():  # without a lock that trainers would wait for; may be begun again
            op.execute("ALTER TABLE runs ADD COLUMN IF NOT EXISTS pruned_at timestamptz")
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {INDEX}")
            op.execute(f"CREATE INDEX CONCURRENTLY {INDEX} ON runs (project_id, ended_at) WHERE pruned_at IS NULL")
    else:
        op.add_column("runs", sa.Column("pruned_at", sa.DateTime(timezone=True), nullable=True))
        op.create_index(INDEX, "runs", ["project_id", "ended_at"], sqlite_where=sa.text("pruned_at IS NULL"))
    op.add_column("projects", sa.Column("retention_days", sa.Integer(), nullable=True))
    op.create_table(
        "prunings",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_prunings"),
    )


def downgrade() -> None:
    op.drop_table("prunings")
    op.drop_column("projects", "retention_days")
    op.drop_index(INDEX, "runs")
    op.drop_column("runs", "pruned_at")
