"""What is read often: summaries of long series, and a project's runs by their status and by a part of their name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
deploy = "before"

BY_STATUS = "ix_runs_project_id_status_id"
BY_PART_OF_NAME = "ix_runs_name_trigrams"

# Release 0.1.0 knows nothing of summaries. It alone writes a monitor's state into the row of the run, in the very
# transaction in which it stores or supersedes observations.
_FORGET = "DELETE FROM series_buckets WHERE run_id = NEW.id"

_FORGET_ON_POSTGRESQL = (
    "CREATE OR REPLACE FUNCTION evalstop_forget_series_buckets() RETURNS trigger LANGUAGE plpgsql "
    f"AS $$ BEGIN {_FORGET}; RETURN NULL; END $$",
    "DROP TRIGGER IF EXISTS evalstop_forget_series_buckets ON runs",
    "CREATE TRIGGER evalstop_forget_series_buckets AFTER UPDATE OF monitor_state ON runs FOR EACH ROW "
    "WHEN (NEW.monitor_state IS NOT NULL) EXECUTE FUNCTION evalstop_forget_series_buckets()",
)

_FORGET_ON_SQLITE = (
    "CREATE TRIGGER evalstop_forget_series_buckets AFTER UPDATE OF monitor_state ON runs "
    f"WHEN NEW.monitor_state IS NOT NULL BEGIN {_FORGET}; END"
)


def upgrade() -> None:
    postgresql = op.get_context().dialect.name == "postgresql"
    if postgresql:
        with op.get_context().autocommit_block():  # without a lock that trainers would wait for; may be begun again
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {BY_STATUS}")
            op.execute(f"CREATE INDEX CONCURRENTLY {BY_STATUS} ON runs (project_id, status, id)")
            _index_parts_of_names()
    else:
        op.create_index(BY_STATUS, "runs", ["project_id", "status", "id"])
    op.create_table(
        "series_buckets",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("lowest", sa.Double(), nullable=True),
        sa.Column("highest", sa.Double(), nullable=True),
        sa.Column("last", sa.Double(), nullable=True),
        sa.Column("nan_count", sa.Integer(), nullable=False),
        sa.Column("infinite_count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "metric", "last_step", name="pk_series_buckets"),
    )
    for statement in _FORGET_ON_POSTGRESQL if postgresql else (_FORGET_ON_SQLITE,):
        op.execute(statement)


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP TRIGGER evalstop_forget_series_buckets ON runs")
        op.execute("DROP FUNCTION evalstop_forget_series_buckets")
        op.execute(f"DROP INDEX IF EXISTS {BY_PART_OF_NAME}")
    else:
        op.execute("DROP TRIGGER evalstop_forget_series_buckets")
    op.drop_table("series_buckets")
    op.drop_index(BY_STATUS, "runs")


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
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {BY_PART_OF_NAME}")
        op.execute(f"CREATE INDEX CONCURRENTLY {BY_PART_OF_NAME} ON runs USING gin (name gin_trgm_ops)")
