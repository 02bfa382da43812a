"""The first schema."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
deploy = "before"

PARTITIONS = 16


def upgrade() -> None:
    """Create every table; on PostgreSQL observations are partitioned by run."""
    bind = op.get_bind()
    op.get_context().opts["target_metadata"].create_all(bind)
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
    op.get_context().opts["target_metadata"].drop_all(op.get_bind())


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
