"""What grows can be spread by run: its keys are led by the run's id, and it refers to nothing of another run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa
from evalstop_service.store.database import Database
from evalstop_service.store.tables import metadata

SMALL = {
    *("projects", "keys", "policies", "endpoints", "experiments"),
    *("rollout_stages", "proposals", "backtests", "audit_log", "audit_chains", "sessions"),
}
"""They grow with people, not with runs; a copy of each on every node will do."""

WHOLE = {"runs"}
"""Grows, and has UNIQUE (project_id, name), which nothing that is spread by its id can have: docs/operations/growth.md
says what to do about it."""

GROWTH = Path(__file__).parents[2] / "docs" / "operations" / "growth.md"


def spread() -> set[str]:
    return set(metadata.tables) - SMALL - WHOLE


def test_run_leads_every_key(database: Database) -> None:
    """The run's id is the first column of the primary key of what grows, and part of all its other unique keys."""
    with database.reading() as tx:
        inspector = sa.inspect(tx)
        for table in spread():
            assert inspector.get_pk_constraint(table)["constrained_columns"][0] == "run_id", table
            unique: list[Sequence[str | None]] = [
                key["column_names"] for key in inspector.get_unique_constraints(table)
            ]
            unique += [index["column_names"] for index in inspector.get_indexes(table) if index["unique"]]
            assert all("run_id" in columns for columns in unique), table


def test_rows_refer_to_their_own_run(database: Database) -> None:
    """A row that grows with runs refers to rows of its own run, and else to small tables alone."""
    with database.reading() as tx:
        inspector = sa.inspect(tx)
        for table in spread() | WHOLE:
            for key in inspector.get_foreign_keys(table):
                target = key["referred_table"]
                pairs = set(zip(key["constrained_columns"], key["referred_columns"], strict=True))
                same_run = ("run_id", "run_id") in pairs or (target in WHOLE and ("run_id", "id") in pairs)
                assert target in SMALL or same_run, (table, key["name"])


def test_whole_tables_are_why(database: Database) -> None:
    """The one table that is excepted has the unique key that the exception is made for."""
    with database.reading() as tx:
        unique = [set(key["column_names"]) for key in sa.inspect(tx).get_unique_constraints("runs")]
    assert unique == [{"project_id", "name"}]


def test_documented() -> None:
    """The page on growth spreads every table that is spread, and copies every other."""
    statements = re.findall(r"SELECT create_(\w+)_table\('(\w+)'", GROWTH.read_text())
    assert {table for kind, table in statements if kind == "distributed"} == spread()
    assert {table for kind, table in statements if kind == "reference"} == SMALL | WHOLE
