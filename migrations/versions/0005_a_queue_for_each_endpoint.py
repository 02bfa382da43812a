"""Deliveries that wait are found endpoint by endpoint, each queue from its head."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
deploy = "before"

INDEX = "ix_deliveries_endpoint_id"
FORMER = "ix_deliveries_due_at"
"""Would tempt planners to pass by all that waits for others. The release before is served by the new one as well."""


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        with op.get_context().autocommit_block():  # without a lock that trainers would wait for; may be begun again
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {INDEX}")
            op.execute(
                f"CREATE INDEX CONCURRENTLY {INDEX} ON deliveries (endpoint_id, due_at, id) WHERE state = 'waiting'"
            )
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {FORMER}")
        # What was delivered lies dead at the head of its queue until a vacuum: a share of the whole table is too late.
        op.execute(
            "ALTER TABLE deliveries SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000)"
        )
    else:
        columns = ["endpoint_id", "due_at", "id"]
        op.create_index(INDEX, "deliveries", columns, sqlite_where=sa.text("state = 'waiting'"))
        op.drop_index(FORMER, "deliveries")


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE deliveries RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold)")
    waiting = sa.text("state = 'waiting'")
    op.create_index(FORMER, "deliveries", ["due_at"], sqlite_where=waiting, postgresql_where=waiting)
    op.drop_index(INDEX, "deliveries")
