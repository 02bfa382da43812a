"""Migrations are marked for a time, give way to whoever works meanwhile, and move observations without losing one."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.store.schema import Phase
from evalstop_service.store.tables import metadata

PREVIOUS_RELEASE = "0002"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DEADLINE_SECONDS = 60.0


def config() -> Config:
    found = Config()
    found.set_main_option("script_location", str(schema.MIGRATIONS))
    return found


def move(database: Database, revision: str) -> None:
    alembic = config()
    with database.transaction() if database.embedded else database.engine.connect() as connection:
        alembic.attributes.update(connection=connection, metadata=metadata)
        command.upgrade(alembic, revision)


def test_each_is_marked() -> None:
    """Every migration says whether it comes before the new code or after the old is gone."""
    marks = [script.module.deploy for script in ScriptDirectory.from_config(config()).walk_revisions()]
    assert set(marks) <= {Phase.BEFORE.value, Phase.AFTER.value}


def test_phases(empty: Database) -> None:
    """The code runs on what the first phase leaves; the second brings it to head; either again changes nothing."""
    assert not schema.serves(schema.current(empty))
    move(empty, PREVIOUS_RELEASE)
    assert not schema.serves(schema.current(empty))
    schema.upgrade(empty, Phase.BEFORE)
    assert schema.current(empty) == schema.needed()
    assert schema.serves(schema.needed())
    schema.upgrade(empty)
    assert schema.current(empty) == schema.head()
    schema.upgrade(empty, Phase.BEFORE)
    assert schema.current(empty) == schema.head()
    assert schema.serves(schema.head())
    assert schema.serves("9999")


@pytest.fixture
def previous(empty_postgres_url: str) -> Iterator[Database]:
    """A PostgreSQL as the previous release leaves it, with two runs and some thousands of observations."""
    database = Database(empty_postgres_url)
    move(database, PREVIOUS_RELEASE)
    fill(database)
    yield database
    database.close()


RUNS = [uuid.UUID(int=number) for number in (1, 2)]


def fill(database: Database) -> None:
    project, policy = uuid.uuid4(), uuid.uuid4()
    with database.transaction() as tx:
        tx.execute(
            sa.text("INSERT INTO projects VALUES (:id, 'p', 'paper', 'shadow', 0, :now)"), {"id": project, "now": NOW}
        )
        tx.execute(
            sa.text("INSERT INTO policies VALUES (:id, :project, 'paper', 1, '{}', :now)"),
            {"id": policy, "project": project, "now": NOW},
        )
        for run in RUNS:
            tx.execute(
                sa.text(
                    "INSERT INTO runs (id, project_id, name, status, attempt, metrics, labels, policy_id, mode,"
                    " version, verdict, created_at, updated_at) VALUES (:id, :project, CAST(:id AS text), 'running',"
                    " 1, '{}', '{}', :policy, 'shadow', 0, '{}', :now, :now)"
                ),
                {"id": run, "project": project, "policy": policy, "now": NOW},
            )
        fill_observations(tx)


def fill_observations(tx: sa.Connection) -> None:
    for run in RUNS:
        tx.execute(
            sa.text(
                "INSERT INTO observations SELECT :id, 'Loss/' || i % 3, i / 3, 0, i, NULL, 1, NULL, :now"
                " FROM generate_series(1, 12345) AS i"
            ),
            {"id": run, "now": NOW},
        )


def contents(database: Database) -> list[Any]:
    with database.reading() as tx:
        return list(
            tx.exec_driver_sql('SELECT * FROM observations ORDER BY run_id, metric COLLATE "C", step, superseded_by')
        )


@contextmanager
def upgrading(database: Database) -> Iterator[list[BaseException]]:
    """The upgrade in a thread of its own, over at the end of the block."""
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            schema.upgrade(database)
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
        if (found := condition()) is not None:
            return found
        time.sleep(0.01)
    raise TimeoutError


def waiting(database: Database, relation: str) -> Callable[[], int | None]:
    """The process that waits for a lock on a table."""

    def look() -> int | None:
        query = "SELECT pid FROM pg_locks WHERE NOT granted AND relation = to_regclass(:relation)"
        with database.reading() as tx:
            pid: int | None = tx.execute(sa.text(query), {"relation": relation}).scalar()
            return pid

    return look


@pytest.mark.parametrize("relation", ["runs", "observations"])
def test_gives_way(previous: Database, relation: str) -> None:
    """A migration that waits for a long transaction lets the short ones pass, and goes on when it can."""
    before = contents(previous)
    with upgrading(previous) as failures, previous.transaction() as long:
        long.exec_driver_sql(f"LOCK TABLE {relation} IN ROW EXCLUSIVE MODE")
        wait_until(waiting(previous, relation))
        for _ in range(3):
            with previous.transaction() as short:  # behind the migration in the queue for the lock
                short.execute(sa.text("SELECT id FROM runs WHERE id = :id FOR UPDATE"), {"id": RUNS[0]})
                short.exec_driver_sql(f"LOCK TABLE {relation} IN ROW EXCLUSIVE MODE")
    assert failures == []
    assert schema.current(previous) == schema.head()
    assert contents(previous) == before


def test_gives_way_where_each_holds_what_the_other_wants(previous: Database) -> None:
    """A migration that deadlocks with somebody at work is begun again when it was the one to be broken off."""
    move(previous, "0007")
    with ExitStack() as ends:
        work = ends.enter_context(previous.transaction())
        work.exec_driver_sql("SET LOCAL deadlock_timeout TO '1min'")  # the migration looks first
        work.exec_driver_sql("LOCK TABLE runs IN ROW EXCLUSIVE MODE")
        with upgrading(previous) as failures:
            wait_until(waiting(previous, "runs"))
            work.exec_driver_sql("SELECT FROM projects LIMIT 1")  # which the migration has altered by now
            ends.close()
    assert failures == []
    assert schema.current(previous) == schema.head()


def test_broken_off_and_begun_again(previous: Database) -> None:
    """A move of observations that breaks off leaves all as it was, misses nothing meanwhile, and can be begun again."""
    move(previous, schema.needed())
    with upgrading(previous) as failures, previous.reading() as reader:
        reader.exec_driver_sql("SELECT FROM observations LIMIT 1")
        mover = wait_until(waiting(previous, "observations"))  # all is copied; the names are to be changed
        with previous.transaction() as tx:
            tx.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": mover})
    assert len(failures) == 1
    assert schema.current(previous) == schema.needed()
    change(previous, RUNS[0], 5000)
    before = contents(previous)
    schema.upgrade(previous)
    assert contents(previous) == before


def test_nothing_is_lost_on_the_way(previous: Database) -> None:
    """Observations that come, go and are superseded while they are moved are afterwards what they would have been."""
    ended = threading.Event()
    failures: list[BaseException] = []
    changes = 0

    def write() -> None:
        nonlocal changes
        try:
            while not ended.is_set():
                change(previous, RUNS[changes % 2], 10_000 + changes)
                changes += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    wait_until(lambda: changes or (failures or None))
    schema.upgrade(previous)
    ended.set()
    thread.join()
    assert failures == []
    moved = contents(previous)
    expected = replayed(previous, changes)
    assert moved == expected


def change(database: Database, run: uuid.UUID, step: int) -> None:
    """What a batch and a resume do to a run's observations."""
    with database.transaction() as tx:
        tx.execute(sa.text("SELECT id FROM runs WHERE id = :id FOR UPDATE"), {"id": run})
        tx.execute(
            sa.text("INSERT INTO observations VALUES (:id, 'Loss/0', :step, 0, 1.5, NULL, 1, NULL, :now)"),
            {"id": run, "step": step, "now": NOW},
        )
        tx.execute(
            sa.text(
                "UPDATE observations SET superseded_by = :step WHERE run_id = :id AND superseded_by = 0"
                " AND step BETWEEN :step % 4000 AND :step % 4000 + 20"
            ),
            {"id": run, "step": step},
        )


def replayed(database: Database, changes: int) -> list[Any]:
    """What the same changes make of the same beginning, one after the other, with nothing moved meanwhile."""
    with database.transaction() as tx:
        tx.exec_driver_sql("DROP TABLE observations CASCADE")
        tx.exec_driver_sql(
            "CREATE TABLE observations (run_id uuid, metric text, step bigint, superseded_by integer, value float8,"
            " stderr float8, attempt integer, observed_at timestamptz, received_at timestamptz)"
        )
        fill_observations(tx)
    for number in range(changes):
        change(database, RUNS[number % 2], 10_000 + number)
    return contents(database)


def test_takes_no_long_lock(previous: Database) -> None:
    """No migration builds an index in the way of writers, rewrites a table, or checks all its rows under a lock."""
    with previous.reading() as tx:
        present = "|".join(set(sa.inspect(tx).get_table_names()) - {"alembic_version"})
    statements: list[str] = []

    def keep(_c: object, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool) -> None:
        statements.append(" ".join(statement.split()))

    sa.event.listen(sa.Engine, "before_cursor_execute", keep)
    try:
        schema.upgrade(previous)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", keep)
    for statement in statements:
        if re.search(rf"\bON ({present})\b", statement) and statement.startswith("CREATE INDEX"):
            assert statement.startswith("CREATE INDEX CONCURRENTLY"), statement
        assert not re.match(rf"(UPDATE|CLUSTER|VACUUM FULL|REINDEX TABLE) ({present})\b", statement), statement
        altered = re.match(rf"ALTER TABLE ({present}) (.*)", statement)
        if altered and altered[1] != "observations":
            assert not re.search(r"ALTER COLUMN|ADD CONSTRAINT|SET NOT NULL|DEFAULT \w+\(", altered[2]), statement
    assert any(statement.startswith("CREATE INDEX CONCURRENTLY") for statement in statements)
