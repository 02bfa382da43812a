"""SIGTERM under load: admitted requests are answered, later ones refused, and exactly the answered ones are stored."""

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
from tests.faults.conftest import Installation, install
from tests.faults.retrying_clients import (
    DEADLINE_SECONDS,
    build_batch,
    check_retryable_refusal,
    create_observations,
    wait_until,
)
from tests.faults.run_records import assert_nothing_lost, find_run, load_observations
from tests.service.project_fixture import ProjectFixture

pytestmark = pytest.mark.real

CLIENTS = 8


@pytest.fixture
def installation(tmp_path: Path, clone_postgres: ClonePostgres) -> Iterator[Installation]:
    """A service of the test's own."""
    yield from install(tmp_path, clone_postgres())


def test_only_answered_posts_are_stored(installation: Installation, embedded_database: Database) -> None:
    """A service that gets SIGTERM amid posts answers all that it stores and refuses the rest with a retryable 503."""
    service = installation.service
    with ThreadPoolExecutor(CLIENTS) as threads:
        all_posted, acknowledged = threading.Event(), [0] * CLIENTS

        def post_until_refused(number: int) -> tuple[str, list[list[PostedObservation]]]:
            stored: list[list[PostedObservation]] = []
            with installation.open_client() as client:
                terms = {"name": f"run-{number}", "policy": "paper", "mode": "enforce"}
                run_id: str = client.post("/runs", terms)["id"]
                while True:
                    points = create_observations(len(stored))
                    try:
                        response = client.post_once(f"/runs/{run_id}/observations", build_batch(points))
                    except httpx.TransportError:
                        return run_id, stored
                    if response.status_code != 200:
                        check_retryable_refusal(response)
                        return run_id, stored
                    stored.append(points)
                    acknowledged[number] += 1
                    if min(acknowledged) >= 10:
                        all_posted.set()

        clients = [threads.submit(post_until_refused, number) for number in range(CLIENTS)]
        wait_until(lambda: all_posted.is_set() or any(client.done() for client in clients), "all have posted")
        service.stop()
        results = [client.result() for client in clients]
    for run_id, stored in results:
        assert len(stored) >= 10
        assert_nothing_lost(installation.project, run_id, stored, embedded_database)


def test_requests_waiting_for_the_database_are_answered(installation: Installation) -> None:
    """Requests that wait for the database at SIGTERM are answered, while new connections are refused."""
    project, service = installation.project, installation.service
    with (
        ThreadPoolExecutor(CLIENTS) as threads,
        installation.open_client() as client,
    ):
        (program,) = service.programs
        run_ids = [client.post("/runs", {"name": f"run-{number}"})["id"] for number in range(CLIENTS)]

        def post(run_id: str) -> int:
            with installation.open_client() as client:
                try:
                    response = client.post_once(f"/runs/{run_id}/observations", build_batch(create_observations(0)))
                except httpx.TransportError:  # sent too late to be admitted
                    return 0
                assert response.status_code == 200
                accepted: int = response.json()["accepted"]
                return accepted

        with project.database.transaction() as tx:
            tx.exec_driver_sql("LOCK TABLE observations IN SHARE MODE")
            posts = [threads.submit(post, run_id) for run_id in run_ids]
            wait_until(lambda: _count_waiting(project) > 0, "the service waits for the table")
            program.terminate()
            wait_until(lambda: _refuses_connections(service.url), "new connections are refused")
        accepted = [post_result.result() for post_result in posts]
        program.wait(DEADLINE_SECONDS)
    assert any(accepted)
    assert [len(load_observations(project, find_run(project, run_id))) for run_id in run_ids] == accepted


def test_waiting_receivers_are_answered(installation: Installation) -> None:
    """A receiver that waits for events at SIGTERM is told that there are none, so that it asks another replica."""
    project, service = installation.project, installation.service
    with (
        ThreadPoolExecutor(1) as threads,
        installation.open_client() as client,
    ):
        (program,) = service.programs
        endpoint_id = client.post("/pull/endpoints", {"name": "receiver"})["id"]
        claim = threads.submit(client.post_once, f"/pull/endpoints/{endpoint_id}/claim", {"wait_seconds": 30})
        wait_until(lambda: _has_claimed(project), "the receiver waits")
        service.stop()
        assert (claim.result().status_code, claim.result().json()) == (200, {"events": []})
        assert "Traceback" not in program.read_log()


def _has_claimed(project: ProjectFixture) -> bool:
    """Whether a session has looked for events of an endpoint."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%%SELECT EXISTS%%deliveries.endpoint_id = %%'"
    with project.database.reading() as tx:
        count: int = tx.exec_driver_sql(query).scalar_one()
    return count > 0


def _count_waiting(project: ProjectFixture) -> int:
    """Count the sessions that wait for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with project.database.reading() as tx:
        count: int = tx.exec_driver_sql(query).scalar_one()
    return count


def _refuses_connections(url: str) -> bool:
    """Whether the server no longer accepts connections."""
    try:
        httpx.get(f"{url}/livez", trust_env=False)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass
    return False
