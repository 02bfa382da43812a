"""PostgreSQL restarts, closes connections and aborts transactions: the service retries a few times, loses nothing."""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_service.store.database import Database

from tests.conftest import ClonePostgres
from tests.faults.conftest import Installation
from tests.faults.retrying_clients import (
    RetryingClient,
    Trainer,
    build_batch,
    check_retryable_refusal,
    create_observations,
    run_trainers,
    wait_for_batches,
    wait_until,
)
from tests.faults.run_records import assert_nothing_lost, create_project_and_key, find_run, load_observations
from tests.faults.servers import RestartablePostgres, start_replica

pytestmark = pytest.mark.real

TRAINERS = 4
CUTS = 5
TERMINATE_CONNECTIONS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
MAX_ATTEMPTS = 6
"""How often a transaction is attempted before its requests are refused."""


def create_trainers(installation: Installation, end: threading.Event) -> list[Trainer]:
    return [Trainer(installation.open_client(), f"run-{number}", end) for number in range(TRAINERS)]


def count_refusals(trainers: Sequence[Trainer]) -> int:
    """Count the refusals that the trainers received."""
    return sum(len(trainer.client.refusals) for trainer in trainers)


def test_postgres_restarts_lose_nothing(
    restartable_postgres: RestartablePostgres, restartable_installation: Installation, embedded_database: Database
) -> None:
    """While PostgreSQL is down, requests wait or are refused; after its restart nothing acknowledged is lost."""
    end = threading.Event()
    trainers = create_trainers(restartable_installation, end)
    with run_trainers(trainers, end):
        for stop_signal in (signal.SIGINT, signal.SIGQUIT):
            wait_for_batches(trainers, 15)
            restartable_postgres.restart(stop_signal)
        wait_for_batches(trainers, 15)
        restartable_postgres.stop(signal.SIGQUIT)
        refusals_before = count_refusals(trainers)
        wait_until(lambda: count_refusals(trainers) > refusals_before, "requests are refused while PostgreSQL is down")
        restartable_postgres.start()
        wait_for_batches(trainers, 15)
    assert sum(trainer.client.connection_errors for trainer in trainers) == 0
    for trainer in trainers:
        assert_nothing_lost(restartable_installation.project, trainer.run_id, trainer.acknowledged, embedded_database)


def test_closed_connections_are_retried(installation: Installation, embedded_database: Database) -> None:
    """If all connections are terminated repeatedly under load, no client gets an error and observations count once."""
    end = threading.Event()
    trainers = create_trainers(installation, end)
    with run_trainers(trainers, end):
        wait_until(lambda: all(trainer.acknowledged for trainer in trainers), "every run is open")
        for _ in range(CUTS):
            wait_for_batches(trainers, 12)
            with installation.project.database.transaction() as tx:
                tx.exec_driver_sql(TERMINATE_CONNECTIONS)
        wait_for_batches(trainers, 12)
    assert [(trainer.client.connection_errors, trainer.client.refusals) for trainer in trainers] == [(0, [])] * TRAINERS
    for trainer in trainers:
        assert_nothing_lost(installation.project, trainer.run_id, trainer.acknowledged, embedded_database)


def test_readiness_notices_a_server_that_only_reads(installation: Installation) -> None:
    """After a failover the old server answers, but /readyz says 503: no balancer sends observations there."""
    with installation.project.database.engine.connect() as connection:  # its own session stays as it is
        for setting, status in (("SET default_transaction_read_only TO on", 503), ("RESET ALL", 200)):
            connection.exec_driver_sql(f"ALTER DATABASE {connection.engine.url.database} {setting}")
            connection.exec_driver_sql(TERMINATE_CONNECTIONS)
            connection.commit()
            assert httpx.get(f"{installation.service.url}/readyz", trust_env=False, timeout=60).status_code == status


def test_no_more_connections_are_opened_than_configured(tmp_path: Path, clone_postgres: ClonePostgres) -> None:
    """While posts wait for rows and others ask for pages, the connections of a process stay within its setting."""
    database = Database(clone_postgres())
    _, key = create_project_and_key(database)
    role, most = f"limited_{uuid.uuid4().hex}", "3"
    with database.transaction() as tx:
        tx.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'x' CONNECTION LIMIT {most}")
        tx.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        tx.exec_driver_sql(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
    url = database.url.set(drivername="postgresql", username=role, password="x").render_as_string(False)
    with start_replica(tmp_path, url, EVALSTOP_DATABASE_CONNECTIONS=most) as service, ThreadPoolExecutor(8) as threads:

        def call(path: str, body: dict[str, Any] | None = None) -> str:
            with RetryingClient(key, lambda: service.url) as client:
                answer = client.get(path) if body is None else client.post(path, body)
                assert (client.refusals, client.connection_errors) == ([], 0)
                return str(answer.get("id"))

        run_ids = list(threads.map(lambda number: call("/runs", {"name": f"run-{number}"}), range(8)))
        batch = build_batch(create_observations(0))
        with database.transaction() as tx:  # each post waits for its run, and after a moment the next one is tried
            tx.exec_driver_sql("SELECT 1 FROM runs FOR UPDATE")
            posts = [threads.submit(call, f"/runs/{run_id}/observations", batch) for run_id in run_ids[:4]]
            for run_id in run_ids * 2:
                call(f"/runs/{run_id}")
            assert list(threads.map(lambda run_id: call(f"/runs/{run_id}"), run_ids * 2)) == run_ids * 2
        assert len([post.result() for post in posts]) == 4
        assert "too many connections" not in service.programs[0].read_log()
    database.close()


@contextmanager
def fail_transactions(database: Database, sqlstate: str, times: int, *, at_commit: bool = False) -> Iterator[None]:
    """Make the next transactions that store observations fail with this SQLSTATE, at the insert or at the commit."""
    kind, event, each = "TRIGGER", "INSERT ON observations", "FOR EACH STATEMENT"
    if at_commit:
        kind, event = "CONSTRAINT TRIGGER", "UPDATE ON runs"
        each = "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
    with database.transaction() as tx:
        tx.exec_driver_sql("CREATE SEQUENCE trigger_calls")  # a rollback does not undo nextval
        tx.exec_driver_sql(
            "CREATE FUNCTION fail_first_calls() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF nextval('trigger_calls') <= {times} THEN"
            f" RAISE EXCEPTION 'injected' USING ERRCODE = '{sqlstate}'; END IF;"
            " RETURN NULL; END $$"
        )
        tx.exec_driver_sql(f"CREATE {kind} fail_trigger AFTER {event} {each} EXECUTE FUNCTION fail_first_calls()")
    try:
        yield
    finally:
        with database.transaction() as tx:
            tx.exec_driver_sql("DROP FUNCTION fail_first_calls CASCADE")
            tx.exec_driver_sql("DROP SEQUENCE trigger_calls")


def count_attempts(database: Database) -> int:
    """Count the attempted transactions within fail_transactions."""
    with database.reading() as tx:
        count: int = tx.exec_driver_sql("SELECT last_value FROM trigger_calls").scalar_one()
    return count


@pytest.mark.parametrize(
    ("sqlstate", "at_commit"),
    [("40001", False), ("40P01", False), ("40001", True)],
    ids=["serialization", "deadlock", "serialization-at-commit"],
)
def test_transient_error_is_retried(installation: Installation, sqlstate: str, at_commit: bool) -> None:
    """A transaction that fails twice with a transient error is committed at the third attempt."""
    database = installation.project.database
    with installation.open_client() as client:
        run_id = client.post("/runs", {"name": f"transient-{sqlstate}-{at_commit}"})["id"]
        with fail_transactions(database, sqlstate, times=2, at_commit=at_commit):
            assert client.post(f"/runs/{run_id}/observations", build_batch(create_observations(0)))["accepted"] == 3
            assert count_attempts(database) == 3
        assert client.refusals == []


def test_retries_are_limited(installation: Installation) -> None:
    """After six failed attempts the request is refused with what to do; once the error is gone, it is accepted."""
    database = installation.project.database
    with installation.open_client() as client:
        run_id = client.post("/runs", {"name": "persistent-error"})["id"]
        with fail_transactions(database, "40001", times=MAX_ATTEMPTS):
            problem = check_retryable_refusal(
                client.post_once(f"/runs/{run_id}/observations", build_batch(create_observations(0)))
            )
            assert problem["title"] == "The database cannot be used now"
            assert count_attempts(database) == MAX_ATTEMPTS
            assert load_observations(installation.project, find_run(installation.project, run_id)) == []
            assert client.post(f"/runs/{run_id}/observations", build_batch(create_observations(0)))["accepted"] == 3


@pytest.mark.parametrize(
    ("sqlstate", "status", "advice"),
    [("22012", 500, "log"), ("P0001", 500, "log"), ("42P01", 503, "evalstop migrate")],
    ids=["division", "raised", "no-such-table"],
)
def test_permanent_error_is_not_retried(installation: Installation, sqlstate: str, status: int, advice: str) -> None:
    """An error of the statement itself is answered after one attempt, because a retry would fail too."""
    database = installation.project.database
    with installation.open_client() as client:
        run_id = client.post("/runs", {"name": f"permanent-{sqlstate}"})["id"]
        with fail_transactions(database, sqlstate, times=1):
            response = client.post_once(f"/runs/{run_id}/observations", build_batch(create_observations(0)))
            assert response.status_code == status
            assert advice in response.json()["detail"]
            assert count_attempts(database) == 1
            assert client.post(f"/runs/{run_id}/observations", build_batch(create_observations(0)))["accepted"] == 3
