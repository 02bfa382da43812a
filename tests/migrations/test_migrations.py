"""The migrations create the schema that the code expects, on both databases, upwards, downwards and concurrently."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from subprocess import CompletedProcess
from uuid import uuid4

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from evalstop_service.errors import ServiceError
from evalstop_service.store import decisions, schema
from evalstop_service.store.database import Database
from evalstop_service.store.tables import metadata

from tests.service.commands import run_evalstop
from tests.service.project_fixture import set_up_project


def list_tables(database: Database) -> set[str]:
    with database.reading() as tx:
        return set(sa.inspect(tx).get_table_names())


def count_rows(database: Database) -> dict[str, int]:
    with database.reading() as tx:
        counts = {table: sa.select(sa.func.count()).select_from(table) for table in metadata.sorted_tables}
        return {table.name: tx.execute(count).scalar_one() for table, count in counts.items()}


def compare_with_metadata(database: Database) -> list[object]:
    """The changes that Alembic would make to match the code's tables."""

    def is_compared(thing: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        # Not compared: partitions, a foreign key that SQLite cannot drop, and an index that needs pg_trgm.
        ignored_prefixes = ("observations_p", "fk_observations_", "ix_runs_name_trigrams")
        return not (reflected and (name or "").startswith(ignored_prefixes))

    options = {"compare_type": True, "include_object": is_compared}
    with database.reading() as tx:
        return list(compare_metadata(MigrationContext.configure(tx, opts=options), metadata))


def migrate_to(database: Database, revision: str) -> None:
    """Migrate up or down to a revision."""
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    with database.transaction() if database.embedded else database.engine.connect() as tx:
        config.attributes.update(connection=tx, metadata=metadata)
        (command.downgrade if revision in ("base", "0001") else command.upgrade)(config, revision)


def test_migrated_database_matches_the_code(empty_database: Database) -> None:
    """An empty database that is migrated has exactly the tables, columns, indexes and constraints of the code."""
    assert schema.current_revision(empty_database) is None
    schema.upgrade_schema(empty_database)
    assert schema.current_revision(empty_database) == schema.head_revision()
    assert compare_with_metadata(empty_database) == []


def read_schema(database: Database) -> dict[str, object]:
    """Columns by name, keys and indexes of each table, without partitions and the index that needs pg_trgm."""
    tables: dict[str, object] = {}
    with database.reading() as tx:
        inspector = sa.inspect(tx)
        for table in sorted(metadata.tables):
            columns = sorted(
                (column["name"], str(column["type"]), column["nullable"], str(column["default"]))
                for column in inspector.get_columns(table)
            )
            indexes = [
                (index["name"], index["column_names"], index["unique"], *map(str, index["dialect_options"].values()))
                for index in inspector.get_indexes(table)
                if "trigrams" not in str(index["name"])
            ]
            keys = [str(key) for key in inspector.get_foreign_keys(table) + inspector.get_unique_constraints(table)]
            tables[table] = (columns, sorted(indexes, key=str), sorted(keys), inspector.get_pk_constraint(table))
    return tables


def test_migrations_create_the_same_schema_as_create_all(empty_database: Database) -> None:
    """Types, defaults, keys and partial indexes equal those that SQLAlchemy creates from the code's tables."""
    schema.upgrade_schema(empty_database)
    migrated = read_schema(empty_database)
    migrate_to(empty_database, "base")
    with empty_database.transaction() as tx:
        metadata.create_all(tx)
    assert read_schema(empty_database) == migrated


def test_partial_indexes_are_created(empty_database: Database) -> None:
    """Indexes of pending rows are partial on both databases, which Alembic does not compare."""
    schema.upgrade_schema(empty_database)
    with empty_database.reading() as tx:
        for table, column, state in (("decisions", "due_at", "pending"), ("deliveries", "endpoint_id", "waiting")):
            indexes = {index["name"]: index for index in sa.inspect(tx).get_indexes(table)}
            options = indexes[f"ix_{table}_{column}"]["dialect_options"]
            assert state in str(options[f"{empty_database.engine.dialect.name}_where"])


def test_downgrade_and_upgrade_again(empty_database: Database) -> None:
    """Every migration can be reverted without leaving a table, and applied again."""
    schema.upgrade_schema(empty_database)
    migrate_to(empty_database, "base")
    assert list_tables(empty_database) <= {"alembic_version"}
    assert schema.current_revision(empty_database) is None
    migrate_to(empty_database, "head")
    assert compare_with_metadata(empty_database) == []


def test_newer_schema_is_refused(empty_database: Database) -> None:
    """A schema of a newer version is not changed, and the error says so."""
    schema.upgrade_schema(empty_database)
    with empty_database.transaction() as tx:
        tx.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(ServiceError, match="newer EvalStop"):
        schema.upgrade_schema(empty_database)
    assert schema.current_revision(empty_database) == "9999"


def test_failed_migration_changes_nothing(empty_database: Database) -> None:
    """A migration is one transaction: after a failure the database is as before."""
    with empty_database.transaction() as tx:
        tx.exec_driver_sql("CREATE TABLE runs (id INTEGER)")
    with pytest.raises(sa.exc.DBAPIError):
        schema.upgrade_schema(empty_database)
    assert list_tables(empty_database) - {"alembic_version"} == {"runs"}
    assert schema.current_revision(empty_database) is None


def run_migrate(url: str, *options: str) -> CompletedProcess[str]:
    """Run `evalstop migrate` on this database."""
    return run_evalstop(dict(os.environ), "migrate", "--database-url", url, *options)


def test_second_migrate_changes_nothing(empty_url: str) -> None:
    """A second `evalstop migrate` succeeds, reports that the schema was already at head, and keeps all rows."""
    completed = [run_migrate(empty_url)]
    with closing(Database(empty_url)) as database:
        set_up_project(database).open_run()
        before = count_rows(database)
        completed.append(run_migrate(empty_url))
        assert count_rows(database) == before
    assert [(process.returncode, process.stderr) for process in completed] == [(0, ""), (0, "")]
    assert completed[0].stdout == f"the schema is at {schema.head_revision()} (was empty)\n"
    assert completed[1].stdout == f"the schema is at {schema.head_revision()}, as it was\n"


def test_concurrent_migrations_succeed(empty_url: str) -> None:
    """Two processes that migrate an empty database at the same time both succeed."""
    with ThreadPoolExecutor(2) as replicas:
        completed = list(replicas.map(run_migrate, [empty_url] * 2))
    assert [process.returncode for process in completed] == [0, 0], completed
    database = Database(empty_url)
    assert compare_with_metadata(database) == []
    database.close()


def test_decisions_and_their_history_survive_the_migration_of_groups(empty_database: Database) -> None:
    """A database of the first schema gets groups and keeps its decisions; an attempt still has only one."""
    schema.upgrade_schema(empty_database)
    project = set_up_project(empty_database)
    run, decision = project.open_declining_run()
    before = count_rows(empty_database)
    migrate_to(empty_database, "0001")
    assert "groups" not in list_tables(empty_database)
    schema.upgrade_schema(empty_database)
    assert count_rows(empty_database) == before
    assert project.load_decision(run) == decision
    with empty_database.reading() as tx:
        assert decisions.list_changes(tx, decision) != []
    with pytest.raises(sa.exc.IntegrityError), empty_database.transaction() as tx:
        decisions.add_decision(tx, replace(decision, id=uuid4()))
