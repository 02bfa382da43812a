"""The two databases keep the same promises: transactions, times, NaN, and a schema at head."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa
from evalstop_service.store import schema
from evalstop_service.store.database import Database, contains_text, insert_if_new
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import metadata, projects

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


def a_project(name: str, created_at: datetime = NOW) -> dict[str, object]:
    return {
        "id": new_id(),
        "name": name,
        "default_policy": "paper",
        "default_mode": "shadow",
        "veto_window_seconds": 0.0,
        "created_at": created_at,
    }


def names(database: Database) -> set[str]:
    with database.reading() as tx:
        return set(tx.execute(sa.select(projects.c.name)).scalars())


def test_commits(database: Database) -> None:
    """What a transaction wrote is there for the next one."""
    with database.transaction() as tx:
        tx.execute(sa.insert(projects).values(a_project("kept")))
    assert names(database) == {"kept"}


def test_rolls_back(database: Database) -> None:
    """A transaction whose block raises leaves nothing behind."""

    def fail() -> None:
        with database.transaction() as tx:
            tx.execute(sa.insert(projects).values(a_project("lost")))
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert names(database) == set()


def test_keeps_moments(database: Database) -> None:
    """A moment comes back equal, in UTC and to the microsecond, whatever zone it was written in."""
    with database.transaction() as tx:
        tx.execute(sa.insert(projects).values(a_project("p", NOW.astimezone(timezone(timedelta(hours=5.5))))))
        read = tx.execute(sa.select(projects.c.created_at)).scalar_one()
    assert read == NOW
    assert read.utcoffset() == timedelta(0)


def test_is_at_head(database: Database) -> None:
    """The fixture's database carries the newest schema, and bringing it there again is harmless."""
    assert schema.current_revision(database) == schema.head_revision()
    schema.upgrade_schema(database)
    assert schema.current_revision(database) == schema.head_revision()


def test_has_all_tables(database: Database) -> None:
    """The migrations make every table that the code knows."""
    with database.reading() as tx:
        assert set(metadata.tables) <= set(sa.inspect(tx).get_table_names())


def test_inserts_once(database: Database) -> None:
    """Of two rows with the same unique columns the second one changes nothing and says so."""
    with database.transaction() as tx:
        assert insert_if_new(tx, projects, a_project("one"), ["name"])
        assert not insert_if_new(tx, projects, a_project("one"), ["name"])
    assert names(database) == {"one"}


@pytest.mark.parametrize("part", ["100%", "a_b", "\\", "PPO"])
def test_searches_literally(database: Database, part: str) -> None:
    """A search finds the part as it is written, with no character in it special, in either case."""
    with database.transaction() as tx:
        for name in ("100% done", "100 done", "a_b", "axb", "back\\slash", "ppo-7b"):
            tx.execute(sa.insert(projects).values(a_project(name)))
        found = list(tx.execute(sa.select(projects.c.name).where(contains_text(projects.c.name, part))).scalars())
    assert len(found) == 1
    assert part.lower() in found[0]


def test_counts_right_under_contention(database: Database) -> None:
    """Transactions that read and then write from many threads lose no update."""
    row = a_project("counter")
    with database.transaction() as tx:
        tx.execute(sa.insert(projects).values(row))
    failures: list[BaseException] = []

    def count() -> None:
        try:
            for _ in range(10):
                with database.transaction() as tx:
                    locked = sa.select(projects.c.veto_window_seconds).with_for_update()
                    present = tx.execute(locked).scalar_one()
                    tx.execute(sa.update(projects).values(veto_window_seconds=present + 1))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with database.reading() as tx:
        assert tx.execute(sa.select(projects.c.veto_window_seconds)).scalar_one() == 40


def test_reads_while_another_writes(database: Database) -> None:
    """A reader neither waits for an open writer nor sees what it has not committed."""
    with database.transaction() as tx:
        tx.execute(sa.insert(projects).values(a_project("open")))
        assert names(database) == set()
    assert names(database) == {"open"}


@pytest.mark.parametrize(
    ("pragma", "value"), [("journal_mode", "wal"), ("foreign_keys", 1), ("synchronous", 2), ("busy_timeout", 30000)]
)
def test_sets_pragmas(embedded_database: Database, pragma: str, value: object) -> None:
    """The embedded database is durable and strict on every connection."""
    with embedded_database.reading() as one, embedded_database.reading() as two:
        assert one.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value
        assert two.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value


def test_refuses_to_be_careless(tmp_path: Path) -> None:
    """The embedded database cannot be told to forget what it acknowledged."""
    with pytest.raises(ValueError, match="FULL"):
        Database(f"sqlite:///{tmp_path / 'x.db'}", synchronous="OFF")


def test_is_durable(postgres_database: Database) -> None:
    """No session asks PostgreSQL to acknowledge a commit before it is in the log."""
    with postgres_database.reading() as tx:
        assert tx.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "on"


def test_migrates_once(empty_postgres_url: str) -> None:
    """Replicas that start together bring one empty PostgreSQL to head without stepping on each other."""
    databases = [Database(empty_postgres_url) for _ in range(3)]
    failures: list[BaseException] = []

    def migrate(database: Database) -> None:
        try:
            schema.upgrade_schema(database)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=migrate, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    current = schema.current_revision(databases[0])
    for database in databases:
        database.close()
    assert failures == []
    assert current == schema.head_revision()


def test_patience_with_silence() -> None:
    """How long a silent server is waited for stands in the URL, unless that says something else."""
    query = Database("postgresql://somewhere/evalstop?connect_timeout=3").url.query
    assert (query["connect_timeout"], query["tcp_user_timeout"], query["keepalives_idle"]) == ("3", "20000", "10")


def test_the_server_looks_for_us(postgres_database: Database) -> None:
    """The server is told of every session how long we may be silent: it frees the locks of one that is gone."""
    query = "SELECT name FROM pg_settings WHERE name LIKE 'tcp_%' AND source = 'session' ORDER BY name"
    with postgres_database.reading() as tx:
        told = list(tx.exec_driver_sql(query.replace("%", "%%")).scalars())
    assert told == ["tcp_keepalives_count", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_user_timeout"]
