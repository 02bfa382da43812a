"""Migrations are marked for a time, give way to whoever works meanwhile, and take no long lock."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.store.schema import Phase

pytestmark = pytest.mark.real

DEADLINE_SECONDS = 60.0

LATER = """
from alembic import op

revision, down_revision, branch_labels, depends_on, deploy = "{revision}", "{before}", None, None, "{deploy}"


def upgrade() -> None:
    {statements}
"""


def add_migration(folder: Path, revision: str, deploy: Phase, *statements: str) -> None:
    lines = "\n    ".join(f"op.execute({statement!r})" for statement in statements)
    before = schema.head_revision() if revision == "9001" else f"{int(revision) - 1}"
    text = LATER.format(revision=revision, before=before, deploy=deploy, statements=lines)
    (folder / "versions" / f"{revision}.py").write_text(text)


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The migrations of a release to come: one before its code is deployed, one after the old code is gone."""
    folder = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    add_migration(
        folder,
        "9001",
        Phase.BEFORE,
        "ALTER TABLE projects ADD COLUMN added INTEGER",
        "ALTER TABLE runs ADD COLUMN added INTEGER",
    )
    add_migration(folder, "9002", Phase.AFTER, "ALTER TABLE runs DROP COLUMN added")
    return folder


def test_each_is_marked() -> None:
    """Every migration says whether it comes before the new code or after the old is gone."""
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    marks = [script.module.deploy for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert set(marks) <= {Phase.BEFORE.value, Phase.AFTER.value}


def test_phases(empty: Database, later: Path) -> None:
    """The code runs on what the first phase leaves; the second brings it to head; either again changes nothing."""
    assert not schema.is_served(schema.current_revision(empty), later)
    schema.upgrade_schema(empty)
    assert not schema.is_served(schema.current_revision(empty), later)
    schema.upgrade_schema(empty, Phase.BEFORE, later)
    assert schema.current_revision(empty) == schema.needed_revision(later) == "9001"
    assert schema.is_served("9001", later)
    schema.upgrade_schema(empty, folder=later)
    assert schema.current_revision(empty) == schema.head_revision(later) == "9002"
    schema.upgrade_schema(empty, Phase.BEFORE, later)
    assert schema.current_revision(empty) == "9002"
    assert schema.is_served("9002", later)
    assert schema.is_served("9999", later)


@pytest.fixture
def previous(empty_postgres_url: str) -> Iterator[Database]:
    """A PostgreSQL at the first revision."""
    database = Database(empty_postgres_url)
    schema.upgrade_schema(database)
    yield database
    database.close()


@contextmanager
def upgrading(database: Database, folder: Path) -> Iterator[list[BaseException]]:
    """The upgrade in a thread of its own, over at the end of the block."""
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
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if (result := condition()) is not None:
            return result
        time.sleep(0.01)
    raise TimeoutError


def waiting(database: Database, relation: str) -> Callable[[], int | None]:
    """The process that waits for a lock on a table."""

    def read_pid() -> int | None:
        query = "SELECT pid FROM pg_locks WHERE NOT granted AND relation = to_regclass(:relation)"
        with database.reading() as tx:
            pid: int | None = tx.execute(sa.text(query), {"relation": relation}).scalar()
            return pid

    return read_pid


@pytest.mark.parametrize("relation", ["projects", "runs"])
def test_gives_way(previous: Database, later: Path, relation: str) -> None:
    """A migration that waits for a long transaction lets the short ones pass, and goes on when it can."""
    with upgrading(previous, later) as failures, previous.transaction() as long:
        long.exec_driver_sql(f"LOCK TABLE {relation} IN ROW EXCLUSIVE MODE")
        wait_until(waiting(previous, relation))
        for _ in range(3):
            with previous.transaction() as short:  # behind the migration in the queue for the lock
                short.exec_driver_sql(f"LOCK TABLE {relation} IN ROW EXCLUSIVE MODE")
    assert failures == []
    assert schema.current_revision(previous) == schema.head_revision(later)


def test_gives_way_where_each_holds_what_the_other_wants(previous: Database, later: Path) -> None:
    """A migration that deadlocks with another transaction is run again when PostgreSQL chose it as the victim."""
    with ExitStack() as ends:
        other = ends.enter_context(previous.transaction())
        other.exec_driver_sql("SET LOCAL deadlock_timeout TO '1min'")  # the migration looks first
        other.exec_driver_sql("LOCK TABLE runs IN ROW EXCLUSIVE MODE")
        with upgrading(previous, later) as failures:
            wait_until(waiting(previous, "runs"))
            other.exec_driver_sql("SELECT FROM projects LIMIT 1")  # which the migration has altered by now
            ends.close()
    assert failures == []
    assert schema.current_revision(previous) == schema.head_revision(later)


def test_a_migration_that_broke_off_is_run_again(previous: Database, later: Path) -> None:
    """A migration whose connection is cut leaves the schema as it was, and can be run again."""
    with upgrading(previous, later) as failures, previous.transaction() as long:
        long.exec_driver_sql("LOCK TABLE runs IN ROW EXCLUSIVE MODE")
        pid = wait_until(waiting(previous, "runs"))
        long.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    assert len(failures) == 1
    assert schema.current_revision(previous) == schema.head_revision()
    schema.upgrade_schema(previous, folder=later)
    assert schema.current_revision(previous) == schema.head_revision(later)


def test_takes_no_long_lock(empty_postgres_url: str) -> None:
    """After the first, no migration builds an index in the way of writers, rewrites a table, or checks all its rows
    under a lock."""
    statements: list[str] = []

    def record(_c: object, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool) -> None:
        statements.append(" ".join(statement.split()))

    database = Database(empty_postgres_url)
    sa.event.listen(database.engine, "before_cursor_execute", record)
    schema.upgrade_schema(database)
    with database.reading() as tx:
        tables = set(sa.inspect(tx).get_table_names()) - {"alembic_version"}
    database.close()
    (first,) = (at for at, text in enumerate(statements) if "INTO alembic_version" in text)
    present = "|".join(tables)
    for statement in statements[first:]:
        if re.search(rf"\bON ({present})\b", statement) and statement.startswith("CREATE INDEX"):
            assert statement.startswith("CREATE INDEX CONCURRENTLY"), statement
        assert not re.match(rf"(UPDATE|CLUSTER|VACUUM FULL|REINDEX TABLE) ({present})\b", statement), statement
        altered = re.match(rf"ALTER TABLE ({present}) (.*)", statement)
        if altered:
            assert not re.search(r"ALTER COLUMN|ADD CONSTRAINT|SET NOT NULL|DEFAULT \w+\(", altered[2]), statement
