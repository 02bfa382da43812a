"""SIGTERM under load: what was admitted is answered, the rest is refused, and what was answered is what is stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.conftest import ClonePostgres
from tests.faults.retrying_clients import DEADLINE_SECONDS, Caller, batch, helpful, told, wait_until
from tests.faults.run_records import assert_nothing_lost, installed, run_of, values
from tests.faults.servers import replicas
from tests.service.project_fixture import ProjectFixture

pytestmark = pytest.mark.real

CLIENTS = 8


@pytest.fixture
def project_and_key(clone_postgres: ClonePostgres) -> Iterator[tuple[ProjectFixture, str]]:
    database = Database(clone_postgres())
    yield installed(database)
    database.close()


def url_of(project: ProjectFixture) -> str:
    return project.database.url.set(drivername="postgresql").render_as_string(hide_password=False)


def test_nothing_but_what_was_answered(
    tmp_path: Path, project_and_key: tuple[ProjectFixture, str], embedded_database: Database
) -> None:
    """Told to end amid posts, the service answers all that it stores, and refuses the rest in a way that helps."""
    project, key = project_and_key
    with replicas(tmp_path, url_of(project), 1) as service, ThreadPoolExecutor(CLIENTS) as threads:
        enough, acknowledged = threading.Event(), [0] * CLIENTS

        def post_until_refused(number: int) -> tuple[str, list[list[PostedObservation]]]:
            stored: list[list[PostedObservation]] = []
            with Caller(key, lambda: service.url) as caller:
                terms = {"name": f"run-{number}", "policy": "paper", "mode": "enforce"}
                run_id: str = caller.post("/runs", terms)["id"]
                while True:
                    points = told(len(stored))
                    try:
                        response = caller.try_once(f"/runs/{run_id}/observations", batch(points))
                    except httpx.TransportError:
                        return run_id, stored
                    if response.status_code != 200:
                        helpful(response)
                        return run_id, stored
                    stored.append(points)
                    acknowledged[number] += 1
                    if min(acknowledged) >= 10:
                        enough.set()

        clients = [threads.submit(post_until_refused, number) for number in range(CLIENTS)]
        wait_until(lambda: enough.is_set() or any(client.done() for client in clients), "all have posted")
        service.end()
        results = [client.result() for client in clients]
    for run_id, stored in results:
        assert len(stored) >= 10
        assert_nothing_lost(project, run_id, stored, embedded_database)


def test_what_waits_is_answered(tmp_path: Path, project_and_key: tuple[ProjectFixture, str]) -> None:
    """Requests that wait for the database when the service is told to end are answered; nobody new is let in."""
    project, key = project_and_key
    with (
        replicas(tmp_path, url_of(project), 1) as service,
        ThreadPoolExecutor(CLIENTS) as threads,
        Caller(key, lambda: service.url) as caller,
    ):
        (program,) = service.programs
        run_ids = [caller.post("/runs", {"name": f"run-{number}"})["id"] for number in range(CLIENTS)]

        def post(run_id: str) -> int:
            with Caller(key, lambda: service.url) as own:
                try:
                    response = own.try_once(f"/runs/{run_id}/observations", batch(told(0)))
                except httpx.TransportError:  # it came too late to be admitted
                    return 0
                assert response.status_code == 200
                accepted: int = response.json()["accepted"]
                return accepted

        with project.database.transaction() as tx:
            tx.exec_driver_sql("LOCK TABLE observations IN SHARE MODE")
            posted = [threads.submit(post, run_id) for run_id in run_ids]
            wait_until(lambda: _waiting(project) > 0, "the service waits for the table")
            program.terminate()
            wait_until(lambda: _is_shut(service.url), "nobody new is let in")
        accepted = [answer.result() for answer in posted]
        program.wait(DEADLINE_SECONDS)
    assert any(accepted)
    assert [len(values(project, run_of(project, run_id))) for run_id in run_ids] == accepted


def _waiting(project: ProjectFixture) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with project.database.reading() as tx:
        count: int = tx.exec_driver_sql(query).scalar_one()
    return count


def _is_shut(url: str) -> bool:
    try:
        httpx.get(f"{url}/livez", trust_env=False)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass
    return False
