"""What errors of a real PostgreSQL mean, whichever driver meets them, and what its own settings cannot change."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from evalstop_service.store import runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.faults import Fault, find_fault
from evalstop_service.store.ingest import PostgresIngest
from evalstop_service.web.problems import ProblemKind, problem_of

from tests.conftest import ClonePostgres
from tests.service import committers
from tests.service.concurrency import run_concurrently
from tests.service.project_fixture import NOW, set_up_project

STATEMENTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "serialization": (Fault.CONFLICT, ("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$",)),
    "statement timeout": (Fault.CONFLICT, ("SET LOCAL statement_timeout TO 1", "SELECT pg_sleep(60)")),
    "no schema": (Fault.NO_SCHEMA, ("SELECT 1 FROM nowhere",)),
    "division": (Fault.BUG, ("SELECT 1 / 0",)),
    "read-only": (Fault.AWAY, ("SET LOCAL transaction_read_only TO on", "DELETE FROM projects")),
    "no right": (Fault.REFUSED, ("SET LOCAL ROLE pg_monitor", "DELETE FROM projects")),
    "closed": (Fault.AWAY, ("SELECT pg_terminate_backend(pg_backend_pid())",)),
}


def catch_both(database: Database, statements: tuple[str, ...]) -> list[sa.exc.DBAPIError]:
    """The errors of the last of these statements, in a transaction of each driver."""

    def execute(tx: Transaction, _saved: object = ()) -> None:
        for statement in statements:
            tx.exec_driver_sql(statement)

    async def save() -> None:
        store = PostgresIngest(database)
        try:
            await store.save([], NOW, execute)
        finally:
            await store.close()

    with pytest.raises(sa.exc.DBAPIError) as requests, database.transaction() as tx:
        execute(tx)
    with pytest.raises(sa.exc.DBAPIError) as posts:
        asyncio.run(save())
    return [requests.value, posts.value]


@pytest.mark.parametrize("name", STATEMENTS)
def test_errors_of_both_drivers_mean_the_same(postgres_database: Database, name: str) -> None:
    """An error means the same to requests and to posts: who cannot be helped at once is answered 503."""
    fault, statements = STATEMENTS[name]
    for error in catch_both(postgres_database, statements):
        assert find_fault(error) is fault
        answer = problem_of(error)
        assert (answer.status, "Retry-After" in (answer.headers or {})) == ((500, False), (503, True))[
            fault is not Fault.BUG
        ]
        assert (answer.kind is ProblemKind.DATABASE_AWAY) == fault.is_transient


@pytest.mark.parametrize("wrong", ["user", "database"])
def test_refused_connection_is_no_silence(postgres_url: str, wrong: str) -> None:
    """A server that refuses the account or knows no such database answers, and is not said to be silent."""
    url = sa.make_url(postgres_url)
    url = url.set(username="nobody_here") if wrong == "user" else url.set(database="nowhere")
    database = Database(url.render_as_string(False))
    with pytest.raises(sa.exc.OperationalError) as raised, database.reading():
        pass
    assert find_fault(raised.value) is Fault.REFUSED


@contextmanager
def open_database(url: str, settings: dict[str, str]) -> Iterator[Database]:
    """The database, with other defaults for its sessions."""
    database = Database(url)
    with database.transaction() as tx:
        for name, value in settings.items():
            tx.exec_driver_sql(f"ALTER DATABASE {database.url.database} SET {name} TO '{value}'")
    database.close()
    try:
        yield database
    finally:
        committers.close_committers_of(database)
        database.close()


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_defaults_of_the_database_change_nothing(clone_postgres: ClonePostgres, isolation: str) -> None:
    """Runs that need a new policy are opened at once, and values and times come back as they were posted."""
    others = {"timezone": "Asia/Tokyo", "datestyle": "German", "bytea_output": "escape", "extra_float_digits": "0"}
    others |= {"standard_conforming_strings": "off", "default_transaction_deferrable": "on", "lock_timeout": "20s"}
    with open_database(clone_postgres(), others | {"default_transaction_isolation": isolation}) as database:
        project = set_up_project(database)

        def opening(policy: str) -> Callable[[], object]:
            return lambda: project.open_run(uuid.uuid4().hex, policy=policy)

        assert (
            run_concurrently(*(opening(policy) for policy in ("default", "early", "cautious") for _ in range(4))) == []
        )
        run, decision = project.open_declining_run(labels={"path": "C:\\new"})
        with database.reading() as tx:
            stored = runs.find_run(tx, project.id, run.id)
        assert stored is not None
        assert (stored.labels, stored.created_at) == ({"path": "C:\\new"}, run.created_at)
        assert decision.step == stored.verdict.step
