"""What many runs in one transaction need: their kept monitors apart, and rows of runs that are updated in place."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
deploy = "before"


def upgrade() -> None:
    op.create_table(
        "monitors",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("kept_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_monitors"),
    )
    op.add_column("runs", sa.Column("rewritten_version", sa.Integer(), server_default="0", nullable=False))
    if op.get_context().dialect.name == "postgresql":
        # Room on each page for the next version of a row, so that an update leaves the indices alone.
        op.execute("ALTER TABLE runs SET (fillfactor = 50)")
        op.execute("ALTER TABLE monitors SET (fillfactor = 50)")


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE runs RESET (fillfactor)")
    op.drop_column("runs", "rewritten_version")
    op.drop_table("monitors")
