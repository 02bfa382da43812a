"""The migrations make the schema that the code expects, on both databases, up and down, alone and at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from evalstop_service.errors import ServiceError
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.store.tables import metadata

from tests.service.commands import run_evalstop


def tables(database: Database) -> set[str]:
    with database.reading() as tx:
        return set(sa.inspect(tx).get_table_names())


def differences(database: Database) -> list[object]:
    """What Alembic would change to make the database what the code expects."""

    def is_compared(thing: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        # A partition is no table of its own, the embedded database keeps the foreign key it was born with, and not
        # every PostgreSQL has trigrams.
        apart = ("observations_p", "fk_observations_", "ix_runs_name_trigrams")
        return not (reflected and (name or "").startswith(apart))

    options = {"compare_type": True, "include_object": is_compared}
    with database.reading() as tx:
        return list(compare_metadata(MigrationContext.configure(tx, opts=options), metadata))


def move(database: Database, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    with database.transaction() if database.embedded else database.engine.connect() as tx:
        config.attributes.update(connection=tx, metadata=metadata)
        (command.downgrade if revision == "base" else command.upgrade)(config, revision)


def test_head_is_what_the_code_expects(empty: Database) -> None:
    """Migrated from nothing, the database has the very tables, columns, indices and constraints of the code."""
    assert schema.current_revision(empty) is None
    schema.upgrade_schema(empty)
    assert schema.current_revision(empty) == schema.head_revision()
    assert differences(empty) == []


def read_schema(database: Database) -> dict[str, object]:
    """Columns, keys and indices of each table, but for partitions and what not every PostgreSQL has."""
    found: dict[str, object] = {}
    with database.reading() as tx:
        inspector = sa.inspect(tx)
        for table in sorted(metadata.tables):
            columns = [
                (column["name"], str(column["type"]), column["nullable"], column["default"])
                for column in inspector.get_columns(table)
            ]
            indices = [
                (index["name"], index["column_names"], index["unique"], *map(str, index["dialect_options"].values()))
                for index in inspector.get_indexes(table)
                if "trigrams" not in str(index["name"])
            ]
            keys = [str(key) for key in inspector.get_foreign_keys(table) + inspector.get_unique_constraints(table)]
            found[table] = (columns, sorted(indices, key=str), sorted(keys), inspector.get_pk_constraint(table))
    return found


def test_migrations_make_what_the_tables_say(empty: Database) -> None:
    """Types, defaults, keys and partial indices are those that the tables of the code would be created with."""
    schema.upgrade_schema(empty)
    migrated = read_schema(empty)
    move(empty, "base")
    with empty.transaction() as tx:
        metadata.create_all(tx)
    assert read_schema(empty) == migrated


def test_partial_indices_are_there(empty: Database) -> None:
    """The indices that hold only what waits are partial in both databases, which Alembic does not compare."""
    schema.upgrade_schema(empty)
    with empty.reading() as tx:
        for table, column, state in (("decisions", "due_at", "pending"), ("deliveries", "endpoint_id", "waiting")):
            indices = {index["name"]: index for index in sa.inspect(tx).get_indexes(table)}
            options = indices[f"ix_{table}_{column}"]["dialect_options"]
            assert state in str(options[f"{empty.engine.dialect.name}_where"])


def test_down_and_up_again(empty: Database) -> None:
    """Every migration can be taken back, leaves nothing behind, and can be applied again."""
    schema.upgrade_schema(empty)
    move(empty, "base")
    assert tables(empty) <= {"alembic_version"}
    assert schema.current_revision(empty) is None
    move(empty, "head")
    assert differences(empty) == []


def test_a_newer_schema_is_refused(empty: Database) -> None:
    """A schema that a newer version made is left alone, and the message says so."""
    schema.upgrade_schema(empty)
    with empty.transaction() as tx:
        tx.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(ServiceError, match="newer EvalStop"):
        schema.upgrade_schema(empty)
    assert schema.current_revision(empty) == "9999"


def test_a_migration_is_one_transaction(empty: Database) -> None:
    """A migration that fails half-way leaves the database as it was."""
    with empty.transaction() as tx:
        tx.exec_driver_sql("CREATE TABLE runs (id INTEGER)")
    with pytest.raises(sa.exc.DBAPIError):
        schema.upgrade_schema(empty)
    assert tables(empty) - {"alembic_version"} == {"runs"}
    assert schema.current_revision(empty) is None


def migrate(url: str, *options: str) -> CompletedProcess[str]:
    return run_evalstop(dict(os.environ), "migrate", "--database-url", url, *options)


def test_migrating_twice(empty_url: str) -> None:
    """`evalstop migrate` once more is harmless and says so."""
    done = [migrate(empty_url) for _ in range(2)]
    assert [(one.returncode, one.stderr) for one in done] == [(0, ""), (0, "")]
    assert done[0].stdout == f"the schema is at {schema.head_revision()} (was empty)\n"
    assert done[1].stdout == f"the schema is at {schema.head_revision()}, as it was\n"


def test_migrating_at_once(empty_url: str) -> None:
    """Two replicas that migrate one empty database at the same time both end well."""
    with ThreadPoolExecutor(2) as replicas:
        done = list(replicas.map(migrate, [empty_url] * 2))
    assert [one.returncode for one in done] == [0, 0], done
    database = Database(empty_url)
    assert differences(database) == []
    database.close()


def test_migrating_in_two_phases(empty_url: str) -> None:
    """`evalstop migrate --phase` does one half of the way and then the other."""
    for phase, expected in (("before", schema.needed_revision()), ("after", schema.head_revision())):
        done = migrate(empty_url, "--phase", phase)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"the schema is at {expected}")
