"""Migrations in a running installation: their locks beside other transactions."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.store import schema
from evalstop_service.store.database import Database

pytestmark = pytest.mark.real

DEADLINE_SECONDS = 60.0

MIGRATION_TEMPLATE = """
from alembic import op

revision, down_revision, branch_labels, depends_on = "{revision}", "{previous}", None, None


def upgrade() -> None:
    {statements}
"""


def add_migration(folder: Path, revision: str, *statements: str) -> None:
    """Write a migration that executes these statements and follows the last one."""
    lines = "\n    ".join(f"op.execute({statement!r})" for statement in statements)
    previous = schema.head_revision() if revision == "9001" else f"{int(revision) - 1}"
    text = MIGRATION_TEMPLATE.format(revision=revision, previous=previous, statements=lines)
    (folder / "versions" / f"{revision}.py").write_text(text)


@pytest.fixture
def next_migrations(tmp_path: Path) -> Path:
    """The folder of migrations with two more."""
    folder = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    add_migration(
        folder,
        "9001",
        "ALTER TABLE projects ADD COLUMN added INTEGER",
        "ALTER TABLE runs ADD COLUMN added INTEGER",
    )
    add_migration(folder, "9002", "ALTER TABLE runs DROP COLUMN added")
    return folder


def test_code_runs_on_its_own_schema_and_on_later_ones(empty_database: Database, next_migrations: Path) -> None:
    """An older schema is refused until it is migrated; a repetition changes nothing."""
    schema.upgrade_schema(empty_database)
    assert not schema.is_served(schema.current_revision(empty_database), next_migrations)
    for _ in range(2):
        schema.upgrade_schema(empty_database, next_migrations)
        assert schema.current_revision(empty_database) == schema.head_revision(next_migrations) == "9002"
    assert [schema.is_served(revision, next_migrations) for revision in (None, "9001", "9002", "9999")] == [
        False,
        False,
        True,
        True,
    ]


@pytest.fixture
def migrated(empty_postgres_url: str) -> Iterator[Database]:
    """A PostgreSQL at the current head, on which the next migrations are tested."""
    database = Database(empty_postgres_url)
    schema.upgrade_schema(database)
    yield database
    database.close()


@contextmanager
def upgrade_in_thread(database: Database, folder: Path) -> Iterator[list[BaseException]]:
    """Run the upgrade in a thread, which ends before the block is left; yields its exceptions."""
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            schema.upgrade_schema(database, folder=folder)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=upgrade)
    thread.start()
    try:
        yield failures
    finally:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait until the condition returns a value, and return it."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if (result := condition()) is not None:
            return result
        time.sleep(0.01)
    raise TimeoutError


def find_waiting_process(database: Database, relation: str) -> int | None:
    """The pid of the process that waits for a lock on this table, or None."""
    query = "SELECT pid FROM pg_locks WHERE NOT granted AND relation = to_regclass(:relation)"
    with database.reading() as tx:
        pid: int | None = tx.execute(sa.text(query), {"relation": relation}).scalar()
        return pid


@pytest.mark.parametrize("relation", ["projects", "runs"])
def test_waiting_migration_lets_short_transactions_pass(
    migrated: Database, next_migrations: Path, relation: str
) -> None:
    """A migration that waits for a long transaction does not block short ones, and succeeds afterwards."""
    with ExitStack() as stack:
        long_transaction = stack.enter_context(migrated.transaction())
        long_transaction.exec_driver_sql(f"LOCK TABLE {relation} IN ROW EXCLUSIVE MODE")
        with upgrade_in_thread(migrated, next_migrations) as failures:
            wait_until(lambda: find_waiting_process(migrated, relation))
            for _ in range(3):
                with migrated.transaction() as short_transaction:  # queued behind the migration
                    short_transaction.exec_driver_sql(f"LOCK TABLE {relation} IN ROW EXCLUSIVE MODE")
            stack.close()
    assert failures == []
    assert schema.current_revision(migrated) == schema.head_revision(next_migrations)


@pytest.mark.nightly
def test_deadlocked_migration_is_retried(migrated: Database, next_migrations: Path) -> None:
    """A migration that PostgreSQL cancels because of a deadlock is run again."""
    with ExitStack() as stack:
        other = stack.enter_context(migrated.transaction())
        other.exec_driver_sql("SET LOCAL deadlock_timeout TO '1min'")  # the migration detects the deadlock first
        other.exec_driver_sql("LOCK TABLE runs IN ROW EXCLUSIVE MODE")
        with upgrade_in_thread(migrated, next_migrations) as failures:
            wait_until(lambda: find_waiting_process(migrated, "runs"))
            other.exec_driver_sql("SELECT FROM projects LIMIT 1")  # the migration has locked this table
            stack.close()
    assert failures == []
    assert schema.current_revision(migrated) == schema.head_revision(next_migrations)


@pytest.mark.nightly
def test_migration_can_be_repeated_after_a_lost_connection(migrated: Database, next_migrations: Path) -> None:
    """A migration whose connection is terminated leaves the schema unchanged and can be run again."""
    with ExitStack() as stack:
        long_transaction = stack.enter_context(migrated.transaction())
        long_transaction.exec_driver_sql("LOCK TABLE runs IN ROW EXCLUSIVE MODE")
        with upgrade_in_thread(migrated, next_migrations) as failures:
            pid = wait_until(lambda: find_waiting_process(migrated, "runs"))
            long_transaction.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
            stack.close()
    assert len(failures) == 1
    assert schema.current_revision(migrated) == schema.head_revision()
    schema.upgrade_schema(migrated, folder=next_migrations)
    assert schema.current_revision(migrated) == schema.head_revision(next_migrations)


LONG_LOCKS = (
    ("CREATE INDEX i ON runs (name)", True),
    ("CREATE INDEX CONCURRENTLY i ON runs (name)", False),
    ("UPDATE runs SET name = 'a'", True),
    ("UPDATE alembic_version SET version_num = '2'", False),
    ("ALTER TABLE runs ALTER COLUMN name SET NOT NULL", True),
    ("ALTER TABLE runs ADD CONSTRAINT c CHECK (name <> '')", True),
    ("ALTER TABLE runs ADD COLUMN at TIMESTAMP DEFAULT clock_timestamp()", True),
    ("ALTER TABLE runs ADD COLUMN added INTEGER", False),
    ("VACUUM FULL runs", True),
)


def takes_long_lock(statement: str, tables: Iterable[str]) -> bool:
    """Whether it builds an index without CONCURRENTLY, rewrites a table or validates its rows."""
    names = "|".join(tables)
    if statement.startswith("CREATE INDEX"):
        is_online = statement.startswith("CREATE INDEX CONCURRENTLY")
        return not is_online and re.search(rf"\bON ({names})\b", statement) is not None
    if altered := re.match(rf"ALTER TABLE ({names}) (.*)", statement):
        return re.search(r"ALTER COLUMN|ADD CONSTRAINT|SET NOT NULL|DEFAULT \w+\(", altered[2]) is not None
    return re.match(rf"(UPDATE|CLUSTER|VACUUM FULL|REINDEX TABLE) ({names})\b", statement) is not None


@pytest.mark.parametrize(("statement", "expected"), LONG_LOCKS)
def test_long_locks_are_recognized(statement: str, expected: bool) -> None:
    """Statements that hold a strong lock while they read or write a whole table are told from those that do not."""
    assert takes_long_lock(statement, ["decisions", "runs"]) is expected


def test_no_migration_takes_a_long_lock(empty_postgres_url: str, next_migrations: Path) -> None:
    """No migration after the first takes a long lock."""
    statements: list[str] = []

    def record(_c: object, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool) -> None:
        statements.append(" ".join(statement.split()))

    database = Database(empty_postgres_url)
    sa.event.listen(database.engine, "before_cursor_execute", record)
    schema.upgrade_schema(database, folder=next_migrations)
    with database.reading() as tx:
        tables = set(sa.inspect(tx).get_table_names()) - {"alembic_version"}
    database.close()
    (first_end,) = (index for index, text in enumerate(statements) if "INTO alembic_version" in text)
    later = statements[first_end + 1 :]
    assert "ALTER TABLE runs ADD COLUMN added INTEGER" in later
    assert [statement for statement in later if takes_long_lock(statement, tables)] == []
