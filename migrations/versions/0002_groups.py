"""Groups with a rule: their decisions, and copies of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ENDS_ATTEMPT = (
    "decisions.action <> 'exploit' AND"
    " (decisions.\"group\" IS NULL OR decisions.state NOT IN ('shadow', 'held_out', 'vetoed', 'moot'))"
)
IS_OPEN_EXPLOIT = "action = 'exploit' AND state IN ('on_hold', 'pending', 'requested', 'acknowledged', 'escalated')"


def upgrade() -> None:
    """Add the table, the columns, and the unique indexes that leave exploits out."""
    op.create_table(
        "groups",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("rule", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_groups_project_id")),
        sa.PrimaryKeyConstraint("project_id", "name", name=op.f("pk_groups")),
    )
    op.add_column("runs", sa.Column("exploit", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("decisions", sa.Column("group", sa.Text(), nullable=True))
    op.add_column("decisions", sa.Column("exploit", sa.JSON(none_as_null=True), nullable=True))
    _create_unique_index("uq_decisions_run_id_attempt", ["run_id", "attempt"], ENDS_ATTEMPT)
    _create_unique_index("uq_decisions_open_exploit", ["run_id"], IS_OPEN_EXPLOIT)
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint("uq_decisions_run_id", "decisions", type_="unique")
    else:
        _rebuild_decisions(", CONSTRAINT uq_decisions_run_id UNIQUE (run_id, attempt)", "")


def downgrade() -> None:
    """Remove them, with the decisions that the older code does not know."""
    unknown = "SELECT id FROM decisions WHERE action = 'exploit' OR \"group\" IS NOT NULL"
    op.execute(f"DELETE FROM decision_changes WHERE decision_id IN ({unknown})")  # noqa: S608 - a constant
    op.execute(f"DELETE FROM decisions WHERE id IN ({unknown})")  # noqa: S608
    for index in ("uq_decisions_open_exploit", "uq_decisions_run_id_attempt"):
        op.drop_index(index, "decisions")
    for column in ("exploit", "group"):
        op.drop_column("decisions", column)
    op.drop_column("runs", "exploit")
    op.drop_table("groups")
    if op.get_bind().dialect.name == "postgresql":
        op.create_unique_constraint("uq_decisions_run_id", "decisions", ["run_id", "attempt"])
    else:
        primary = ", CONSTRAINT pk_decisions PRIMARY KEY (run_id, id)"
        _rebuild_decisions(primary, f"{primary}, CONSTRAINT uq_decisions_run_id UNIQUE (run_id, attempt)")


def _create_unique_index(name: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, "decisions", columns, unique=True, sqlite_where=condition, postgresql_where=condition)


def _rebuild_decisions(constraint: str, replacement: str) -> None:
    """Replace a constraint of the table. SQLite cannot drop one: the table is built anew, and its rows are copied.

    Other tables refer to its rows. Those references are checked at the commit, when the rows are there again; renaming
    the table instead would rename what they refer to.
    """
    bind = op.get_bind()
    bind.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
    query = "SELECT sql FROM sqlite_master WHERE tbl_name = 'decisions' AND sql IS NOT NULL ORDER BY type DESC"
    table, *indexes = bind.exec_driver_sql(query).scalars().all()
    altered = " ".join(table.split()).replace(constraint, replacement)
    if altered == " ".join(table.split()):
        raise LookupError(f"the table decisions has no {constraint}")
    columns = ", ".join(f'"{row[1]}"' for row in bind.exec_driver_sql("PRAGMA table_info(decisions)"))
    for statement in (
        "CREATE TABLE decisions_before AS SELECT * FROM decisions",
        "DROP TABLE decisions",
        altered,
        f"INSERT INTO decisions ({columns}) SELECT {columns} FROM decisions_before",  # noqa: S608 - of the table itself
        "DROP TABLE decisions_before",
        *indexes,
    ):
        bind.exec_driver_sql(statement)
