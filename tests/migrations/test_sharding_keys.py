"""Large tables can be distributed by run: their keys include the run's id, and rows refer to the same run only."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import evalstop_service.store
import sqlalchemy as sa
from evalstop_service.store import observations, series
from evalstop_service.store.database import Database
from evalstop_service.store.tables import metadata

REFERENCE_TABLES = {
    *("projects", "keys", "policies", "endpoints", "experiments"),
    *(
        "groups",
        "rollout_stages",
        "proposals",
        "backtests",
        "audit_log",
        "audit_chains",
        "sessions",
    ),
    "veto_listeners",
}
"""They grow with users, not with runs, so that each node can hold a copy."""

UNDISTRIBUTED_TABLES = {"runs"}
"""Large, but with UNIQUE (project_id, name), which a table that is distributed by run id cannot have. See
docs/operations/growth.md."""

STORE = Path(evalstop_service.store.__file__).parent
DISTRIBUTED = re.compile(r"\b(FROM|JOIN|INTO|UPDATE) (observations|monitor_states)\b")
REFUSED = re.compile(r"\b(RECURSIVE|LATERAL)\b")

GROWTH_PAGE = Path(__file__).parents[2] / "docs" / "operations" / "growth.md"


def list_distributed_tables() -> set[str]:
    """The tables that grow with runs and are distributed by run."""
    return set(metadata.tables) - REFERENCE_TABLES - UNDISTRIBUTED_TABLES


def test_keys_of_distributed_tables_include_the_run(database: Database) -> None:
    """In a distributed table the run's id leads the primary key and is part of every other unique key."""
    with database.reading() as tx:
        inspector = sa.inspect(tx)
        for table in list_distributed_tables():
            assert inspector.get_pk_constraint(table)["constrained_columns"][0] == "run_id", table
            unique: list[Sequence[str | None]] = [
                key["column_names"] for key in inspector.get_unique_constraints(table)
            ]
            unique += [index["column_names"] for index in inspector.get_indexes(table) if index["unique"]]
            assert all("run_id" in columns for columns in unique), table


def test_rows_refer_to_their_own_run(database: Database) -> None:
    """A row of a distributed table refers to rows of its own run or to reference tables only."""
    with database.reading() as tx:
        inspector = sa.inspect(tx)
        for table in list_distributed_tables() | UNDISTRIBUTED_TABLES:
            for key in inspector.get_foreign_keys(table):
                target = key["referred_table"]
                pairs = set(zip(key["constrained_columns"], key["referred_columns"], strict=True))
                same_run = ("run_id", "run_id") in pairs or (
                    target in UNDISTRIBUTED_TABLES and ("run_id", "id") in pairs
                )
                assert target in REFERENCE_TABLES or same_run, (table, key["name"])


def test_runs_table_has_the_key_that_prevents_distribution(database: Database) -> None:
    """The exception for `runs` is needed as long as it has this unique key."""
    with database.reading() as tx:
        unique = [set(key["column_names"]) for key in sa.inspect(tx).get_unique_constraints("runs")]
    assert unique == [{"project_id", "name"}]


def test_documentation_distributes_what_grows_without_bound() -> None:
    """The page on growth distributes these tables only: the others stay on the coordinator."""
    statements = re.findall(r"SELECT create_(\w+)_table\('(\w+)'", GROWTH_PAGE.read_text())
    assert sorted(statements) == [("distributed", "monitor_states"), ("distributed", "observations")]
    assert {table for _, table in statements} <= list_distributed_tables()


def test_no_query_is_of_a_form_that_citus_refuses() -> None:
    """Recursive CTEs and LATERAL over the distributed tables are about one run, which Citus routes."""
    refused = set()
    for file in STORE.glob("*.py"):
        source = file.read_text()
        for statement in ast.parse(source).body:
            text = ast.get_source_segment(source, statement) or ""
            is_routed = "{{routed}}" in text or "write_statements(" in text
            is_refused = DISTRIBUTED.search(text) and REFUSED.search(text) and not is_routed
            if isinstance(statement, ast.Assign) and is_refused:
                refused |= {f"{file.stem}.{target.id}" for target in statement.targets if isinstance(target, ast.Name)}
    assert refused == set()


def test_routed_statements_name_their_run_each_time() -> None:
    """Every part of a statement that reads observations has the condition by which Citus routes it."""
    found = [
        value["citus"] for module in (observations, series) for value in vars(module).values() if is_written(value)
    ]
    assert len(found) == 4
    for statement in found:
        text = str(statement)
        assert text.count("observations AS o") == text.count("o.run_id = CAST(:run_id AS uuid) AND ") > 0


def is_written(value: object) -> bool:
    """Whether it is what `write_statements` returns."""
    return isinstance(value, dict) and "citus" in value
