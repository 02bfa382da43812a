"""What both databases guarantee: transactions, times and concurrency."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import uuid
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.errors import ServiceError
from evalstop_service.settings import Settings
from evalstop_service.store import schema
from evalstop_service.store.database import WORK, Database, Transaction, Turns, Work, insert_if_new
from evalstop_service.store.faults import find_fault
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.store.tables import projects
from evalstop_service.web.problems import ProblemKind, problem_of
from psycopg.pq import Conninfo, TransactionStatus

from tests.service.concurrency import count_waiting, run_concurrently, wait_until

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


def build_project_row(name: str, created_at: datetime = NOW) -> dict[str, object]:
    return vars(Project(new_id(), name, created_at, veto_window_seconds=0.0))


def load_project_names(database: Database) -> set[str]:
    with database.reading() as tx:
        return set(tx.execute(sa.select(projects.c.name)).scalars())


def test_file_that_another_process_begins_to_write_is_opened(tmp_path: Path) -> None:
    """SQLite refuses the switch to its log at once while another process writes: it is tried again."""
    file = tmp_path / "new.db"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.2, other.rollback).start()
    database = Database(f"sqlite:///{file}")
    with database.reading() as tx:
        assert tx.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    database.close()
    other.close()


def test_failed_transaction_is_rolled_back(database: Database) -> None:
    """A transaction whose block raises leaves no rows."""

    def insert_and_raise() -> None:
        with database.transaction() as tx:
            tx.execute(sa.insert(projects).values(build_project_row("lost")))
            raise LookupError

    with pytest.raises(LookupError):
        insert_and_raise()
    assert load_project_names(database) == set()


def test_times_keep_microseconds_in_utc(database: Database) -> None:
    """A time is read back equal, in UTC and to the microsecond, whatever zone it was written in."""
    with database.transaction() as tx:
        tx.execute(sa.insert(projects).values(build_project_row("p", NOW.astimezone(timezone(timedelta(hours=5.5))))))
        read = tx.execute(sa.select(projects.c.created_at)).scalar_one()
    assert read == NOW
    assert read.utcoffset() == timedelta(0)


def test_insert_if_new_reports_a_duplicate(database: Database) -> None:
    """A second row with the same unique columns is not inserted, and the call returns False."""
    with database.transaction() as tx:
        assert insert_if_new(tx, projects, build_project_row("one"), ["name"])
        assert not insert_if_new(tx, projects, build_project_row("one"), ["name"])
    assert load_project_names(database) == {"one"}


def test_concurrent_updates_are_not_lost(database: Database) -> None:
    """Transactions that read and then write in several threads lose no update."""
    row = build_project_row("counter")
    with database.transaction() as tx:
        tx.execute(sa.insert(projects).values(row))

    def count_to_ten() -> None:
        for _ in range(10):
            with database.transaction() as tx:
                locked = sa.select(projects.c.veto_window_seconds).with_for_update()
                present = tx.execute(locked).scalar_one()
                tx.execute(sa.update(projects).values(veto_window_seconds=present + 1))

    assert run_concurrently(*[count_to_ten] * 4) == []
    with database.reading() as tx:
        assert tx.execute(sa.select(projects.c.veto_window_seconds)).scalar_one() == 40


def test_reader_does_not_wait_for_a_writer(database: Database) -> None:
    """A reader neither waits for an open transaction nor sees its uncommitted rows."""
    with database.transaction() as tx:
        tx.execute(sa.insert(projects).values(build_project_row("open")))
        assert load_project_names(database) == set()
    assert load_project_names(database) == {"open"}


def test_snapshot_sees_one_state(database: Database) -> None:
    """The statements of a snapshot see no row that was committed after the first one."""
    with database.reading(snapshot=True) as tx:
        assert tx.execute(sa.select(sa.func.count()).select_from(projects)).scalar_one() == 0
        with database.transaction() as other:
            other.execute(sa.insert(projects).values(build_project_row("later")))
        assert tx.execute(sa.select(sa.func.count()).select_from(projects)).scalar_one() == 0


def driver_connection(tx: Transaction) -> Any:
    """The connection of psycopg under a transaction."""
    return tx.connection.driver_connection


def test_reading_needs_no_transaction_on_postgresql(postgres_database: Database) -> None:
    """Statements that only read begin and commit nothing; the next transaction on their connection does."""
    with postgres_database.reading() as tx:
        tx.execute(sa.select(projects.c.id)).all()
        assert driver_connection(tx).info.transaction_status is TransactionStatus.IDLE
    with postgres_database.transaction() as tx:
        tx.execute(sa.select(projects.c.id)).all()
        assert driver_connection(tx).info.transaction_status is TransactionStatus.INTRANS


@pytest.mark.parametrize(
    ("pragma", "value"), [("journal_mode", "wal"), ("foreign_keys", 1), ("synchronous", 2), ("busy_timeout", 30000)]
)
def test_sqlite_pragmas_are_set(embedded_database: Database, pragma: str, value: object) -> None:
    """Every connection to the embedded database is durable and enforces foreign keys."""
    with embedded_database.reading() as first, embedded_database.reading() as second:
        assert first.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value
        assert second.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value


def test_postgresql_commits_synchronously(postgres_database: Database) -> None:
    """Sessions leave `synchronous_commit` on, unless it is turned off in PostgreSQL."""
    with postgres_database.reading() as tx:
        assert tx.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "on"


def test_timeouts_are_in_the_postgresql_url() -> None:
    """The URL sets timeouts for a silent server, unless it already has them."""
    query = Database("postgresql://somewhere/evalstop?connect_timeout=3").url.query
    assert (query["connect_timeout"], query["tcp_user_timeout"], query["keepalives_idle"]) == ("3", "20000", "10")


def test_server_detects_lost_clients(postgres_database: Database) -> None:
    """Each session sets TCP keepalives on the server, which then frees the locks of a lost client."""
    query = "SELECT name FROM pg_settings WHERE name LIKE 'tcp_%' AND source = 'session' ORDER BY name"
    with postgres_database.reading() as tx:
        session_settings = list(tx.exec_driver_sql(query.replace("%", "%%")).scalars())
    assert session_settings == [
        "tcp_keepalives_count",
        "tcp_keepalives_idle",
        "tcp_keepalives_interval",
        "tcp_user_timeout",
    ]


KEYWORDS = {
    **{"connect_timeout": "7", "channel_binding": "disable", "client_encoding": "utf8", "options": "-c geqo=off"},
    **{"application_name": "a", "fallback_application_name": "b", "keepalives": "0", "tcp_user_timeout": "9000"},
    **{"keepalives_idle": "9", "keepalives_interval": "9", "keepalives_count": "9", "sslmode": "disable"},
    **{"sslcompression": "0", "sslcertmode": "disable", "sslsni": "0", "sslkey": "/no", "sslcert": "/no"},
    **{"ssl_min_protocol_version": "TLSv1.2", "ssl_max_protocol_version": "TLSv1.3", "sslpassword": "p"},
    **{"sslnegotiation": "postgres", "sslcrl": "/no", "sslcrldir": "/no", "sslrootcert": "/no", "requirepeer": ""},
    **{"require_auth": "scram-sha-256,md5,none", "gssencmode": "disable", "krbsrvname": "postgres"},
    **{"gssdelegation": "0", "target_session_attrs": "any", "load_balance_hosts": "disable"},
}
"""libpq's keywords, apart from those of the address and the account, with harmless values."""


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_parameter_of_libpq_is_for_both_drivers(postgres_database: Database, keyword: str) -> None:
    """What libpq takes in the URL does not keep the other driver from the database."""
    if keyword.encode() not in {item.keyword for item in Conninfo.get_defaults()}:
        pytest.skip("this libpq does not know it")
    url = postgres_database.url.update_query_dict({keyword: KEYWORDS[keyword]}).render_as_string(False)
    assert read_by_both_drivers(url) == [1, 1]


def test_list_of_servers_is_for_both_drivers(postgres_database: Database) -> None:
    """Each driver takes the first server that answers; settings turn libpq's `HOST:PORT,HOST:PORT` into such a list."""
    written = Settings(database_url="postgresql://me:secret@db-1:5433,10.0.0.2/evalstop?sslmode=require").url
    assert written == "postgresql://me:secret@/evalstop?host=db-1,10.0.0.2&port=5433,5432&sslmode=require"
    servers = {"host": f"/nowhere,{postgres_database.url.query['host']}", "port": "5433,5432"}
    assert read_by_both_drivers(postgres_database.url.update_query_dict(servers).render_as_string(False)) == [1, 1]


@pytest.mark.parametrize("written", ["postgres://{user}@{socket}/{name}", "postgresql://{user}@{socket}:5432/{name}"])
def test_socket_in_the_address_is_for_both_drivers(postgres_database: Database, written: str) -> None:
    """A percent-encoded folder of the server's socket may stand where the host does, as libpq has it."""
    url = postgres_database.url
    socket = str(url.query["host"]).replace("/", "%2F")
    settings = Settings(database_url=written.format(user=url.username, socket=socket, name=url.database))
    assert read_by_both_drivers(settings.url) == [1, 1]


def test_parameters_of_a_file_are_for_both_drivers(
    postgres_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service file may name the server, and a setting of the session may stand in the URL."""
    url, services = postgres_database.url, tmp_path / "services"
    services.write_text(f"[mine]\nhost={url.query['host']}\nuser={url.username}\ndbname={url.database}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    written = Settings(database_url="postgresql:///?service=mine&options=-c%20work_mem%3D8MB").url
    assert read_by_both_drivers(written, "SHOW work_mem") == ["8MB", "8MB"]


def test_isolation_is_the_services_own(empty_postgres_url: str) -> None:
    """A role or database that defaults to another level changes nothing: concurrent inserts would fail there."""
    database = Database(empty_postgres_url)
    with database.transaction() as tx:
        name = tx.engine.url.database
        tx.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_isolation TO 'repeatable read'")
    database.close()
    assert read_by_both_drivers(empty_postgres_url, "SHOW transaction_isolation") == ["read committed"] * 2


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_other_encoding_is_refused(postgres_database: Database, empty_postgres_url: str, encoding: str) -> None:
    """Migrations say which encoding the database has, and how to create one that works."""
    url, name = sa.make_url(empty_postgres_url), f"latin_{uuid.uuid4().hex[:8]}"
    with postgres_database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'")
        database = Database(url.set(database=name).render_as_string(False))
        try:
            with pytest.raises(ServiceError, match=rf"encoding is {encoding}.*ENCODING 'UTF8'"):
                schema.upgrade_schema(database)
        finally:
            database.close()
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


def test_refusal_by_the_database_is_named(postgres_database: Database) -> None:
    """A right that the service's role lacks is no bug and no outage, and the request may be sent again."""
    with postgres_database.engine.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE nobody_here")
        connection.exec_driver_sql("SET LOCAL ROLE nobody_here")
        with pytest.raises(sa.exc.ProgrammingError) as raised:
            connection.exec_driver_sql("SELECT 1 FROM runs")
    answer = problem_of(raised.value)
    assert (answer.status, answer.kind) == (503, ProblemKind.DATABASE_REFUSES)


def read_by_both_drivers(url: str, query: str = "SELECT 1") -> list[object]:
    """What each driver answers to the query."""
    database = Database(url)

    async def read_one() -> object:
        async with database.async_engine().connect() as connection:
            return (await connection.execute(sa.text(query))).scalar_one()

    try:
        with database.reading() as tx:
            return [tx.execute(sa.text(query)).scalar_one(), asyncio.run(read_one())]
    finally:
        database.close()


def test_read_only_server_is_left(empty_postgres_url: str) -> None:
    """A connection on which the server is read-only, as after a failover, is dropped; the next one can write."""
    database = Database(empty_postgres_url, connections=2)

    def create(name: str) -> None:
        with database.transaction() as tx:
            tx.exec_driver_sql(f"CREATE TABLE {name} (id int)")

    create("before")
    with database.transaction() as tx:
        tx.exec_driver_sql("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    with pytest.raises(sa.exc.InternalError) as raised:
        create("between")
    assert find_fault(raised.value).is_transient
    answer = problem_of(raised.value)
    assert (answer.status, answer.headers) == (503, {"Retry-After": "1"})
    assert answer.kind.title == "The database cannot be used now"
    create("after")
    database.close()


def test_decisions_go_first() -> None:
    """Decisions are served first, and among equals whoever came first."""
    turns, served = Turns(), list[str]()

    def write(name: str, work: Work) -> None:
        WORK.set(work)
        with turns.take():
            served.append(name)

    works = {"a": Work("key", "a"), "b": Work("key", "b"), "veto": Work("key", "b", is_decision=True), "none": Work()}
    threads = []
    with turns.take():
        for waiting_count, (name, work) in enumerate(works.items(), start=1):
            threads.append(threading.Thread(target=write, args=(name, work)))
            threads[-1].start()
            wait_until(lambda waiting_count=waiting_count: count_waiting(turns) == waiting_count)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert served == ["veto", "a", "b", "none"]
    with turns.take():
        assert count_waiting(turns) == 0
