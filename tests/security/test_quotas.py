"""Quotas of a project: requests over a quota are refused with its name, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from evalstop_detectors import POLICIES
from evalstop_service.clock import utc_now
from evalstop_service.domain.project_settings import Quotas
from evalstop_service.errors import QuotaReached
from evalstop_service.store import counts, projects
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation

from tests.fixtures.projects import create_named_key
from tests.security.served_project import PROJECT, ServedProject, serve_project
from tests.service.project_fixture import set_up_project
from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.routes import BODIES, ENDPOINT

NARROW = Quotas(open_runs=2, runs_per_day=3, metrics_per_run=100, keys=2, endpoints=1, policies=len(POLICIES) + 2)


def set_quotas(database: Database, name: str, quotas: Quotas) -> None:
    with database.transaction() as tx:
        project_row = projects.find_project_by_name(tx, name)
        assert project_row is not None
        projects.update_project(tx, replace(project_row, quotas=quotas))


@pytest.fixture
def project(embedded_database: Database) -> Iterator[ServedProject]:
    """A project with narrow quotas."""
    with serve_project(embedded_database, veto_window_seconds=3600.0) as project:
        set_quotas(embedded_database, PROJECT, NARROW)
        yield project


@pytest.fixture
def client(project: ServedProject) -> httpx.Client:
    """A client with the only key of the project."""
    return project.open_client(name="all")


def test_request_over_a_quota_names_it(project: ServedProject, client: httpx.Client) -> None:
    """The code is `quota_reached`, with 429 if waiting helps; what existed before still works."""
    runs = [expect_json(client.post("/runs", json={"name": f"r{index}"}), 201)["id"] for index in range(2)]
    policy = BODIES["POST", "/policies"]
    requests_over_quota: dict[str, tuple[int, Callable[[], httpx.Response]]] = {
        "open_runs": (429, lambda: client.post("/runs", json={"name": "one more"})),
        "keys": (409, lambda: client.post("/keys", json={"name": "k3", "scopes": ["read"]})),
        "endpoints": (409, lambda: client.post("/endpoints", json=ENDPOINT | {"url": "http://127.0.0.1:8/"})),
        "policies": (409, lambda: client.post("/policies", json=policy | {"min_evals": 30})),
        "metrics_per_run": (409, lambda: post_metrics(client, runs[0], 101)),
    }
    expect_json(client.post("/keys", json={"name": "k2", "scopes": ["read"]}), 201)
    expect_json(client.post("/endpoints", json=ENDPOINT), 201)
    for evals in (10, 20):
        expect_json(client.post("/policies", json=policy | {"min_evals": evals}), 201)
    expect_json(post_metrics(client, runs[0], 100), 200)
    for quota, (status, send_request) in requests_over_quota.items():
        refused = expect_problem(send_request(), status)
        assert refused["code"] == "quota_reached"
        assert quota in refused["detail"]
        assert project.count_refused(f"quota {quota}") == 1
    expect_json(client.post("/policies", json=policy | {"min_evals": 20}), 201)  # the latest once more
    expect_json(client.post("/runs", json={"name": "r0"}), 200)
    expect_json(post_metrics(client, runs[0], 100, step=2), 200)
    expect_json(client.post(f"/runs/{runs[0]}/finish", json={"status": "completed"}), 200)
    expect_json(client.post("/runs", json={"name": "r2"}), 201)
    expect_json(client.post(f"/runs/{runs[1]}/finish", json={"status": "completed"}), 200)
    last_run = client.post("/runs", json={"name": "r3"})
    assert "runs_per_day" in expect_problem(last_run, 429)["detail"]
    assert 0 < int(last_run.headers["retry-after"]) <= 86_400


def test_reopened_run_counts_as_open(project: ServedProject, client: httpx.Client) -> None:
    """A run that has ended is reopened only while the project has room; attaching to an open run needs none."""
    ended, other = [expect_json(client.post("/runs", json={"name": name}), 201)["id"] for name in ("r0", "r1")]
    expect_json(client.post(f"/runs/{ended}/finish", json={"status": "completed"}), 200)
    expect_json(client.post("/runs", json={"name": "r2"}), 201)
    mlflow_update = {"run_id": UUID(ended).hex, "status": "RUNNING"}
    ways: list[Callable[[], httpx.Response]] = [
        lambda: client.post("/runs", json={"name": "r0", "resume": "must"}),
        lambda: client.post(f"/runs/{ended}/resume", json={"step": 0}),
        lambda: client.post(f"{project.url}/mlflow/api/2.0/mlflow/runs/update", json=mlflow_update),
    ]
    expect_json(client.post("/runs", json={"name": "r1", "resume": "must"}), 200)
    for reopen in ways:
        refused = reopen()
        assert (refused.status_code, "open_runs" in refused.text) == (429, True)
    assert expect_json(client.get(f"/runs/{ended}"), 200)["status"] == "completed"
    expect_json(client.post(f"/runs/{other}/finish", json={"status": "completed"}), 200)
    for reopen in ways:
        assert reopen().is_success
        expect_json(client.post(f"/runs/{ended}/finish", json={"status": "completed"}), 200)


def post_metrics(client: httpx.Client, run_id: str, count: int, step: int = 1) -> httpx.Response:
    points = [{"metric": f"m{index}", "step": step, "value": 0.5} for index in range(count)]
    return client.post(f"/runs/{run_id}/observations", json={"observations": points})


def test_batch_over_the_metrics_quota_is_refused_whole(database: Database) -> None:
    """A batch with one new metric too many stores nothing; known metrics are still accepted."""
    project = set_up_project(database)
    with database.transaction() as tx:
        project_row = projects.get_project(tx, project.id)
        projects.update_project(tx, replace(project_row, quotas=Quotas(metrics_per_run=150)))
    run = project.open_run()

    def build_observations(first: int, last: int, step: int) -> list[PostedObservation]:
        return [PostedObservation(f"m{index}", step, 0.5) for index in range(first, last)]

    assert project.post_observations(run, build_observations(0, 150, 1)).accepted == 150
    with pytest.raises(QuotaReached, match="metrics_per_run"):
        project.post_observations(run, build_observations(140, 151, 2))
    assert project.post_observations(run, build_observations(140, 150, 2)).accepted == 10


def test_quota_use_is_counted_per_project(database: Database) -> None:
    """Runs of other projects do not count, and runs per day start at zero the next day."""
    project, other = set_up_project(database), set_up_project(database)
    now = datetime.now(UTC)
    project.open_run()
    expected = {
        "open_runs": 1,
        "runs_per_day": 1,
        "keys": 0,
        "endpoints": 0,
        "policies": len(POLICIES) + 1,
        "experiments": 0,
    }
    unused = {"open_runs": 0, "runs_per_day": 0}
    assert count_use(database, project.id, now) == expected
    assert count_use(database, project.id, now + timedelta(days=1)) == expected | {"runs_per_day": 0}
    assert count_use(database, other.id, now) == expected | unused


def count_use(database: Database, project_id: UUID, now: datetime) -> dict[str, int]:
    with database.reading() as tx:
        return {use.quota: use.used for use in counts.load_use(tx, now, projects.get_project(tx, project_id))}


def test_daily_quota_is_reset_at_midnight_utc() -> None:
    """A refused run waits until midnight, and ids of a moment are not below the first id of that moment."""
    assert (
        counts.first_id(datetime.now(UTC) - timedelta(seconds=1))
        < new_id()
        < counts.first_id(datetime.now(UTC) + timedelta(seconds=1))
    )
    evening = datetime(2026, 1, 1, 23, 58, 57, 500_000, tzinfo=UTC)
    assert counts.first_id(evening) == UUID("019b7c00-0fdc-7000-8000-000000000000")
    assert counts.seconds_to_wait("runs_per_day", evening) == 62.5
    assert counts.seconds_to_wait("open_runs", evening) == 60.0
    assert counts.seconds_to_wait("keys", evening) is None


def test_project_key_cannot_raise_its_quotas(client: httpx.Client, embedded_database: Database) -> None:
    """Only a key to the installation can."""
    project_id = expect_json(client.get("/project"), 200)["id"]
    path, wanted = f"/projects/{project_id}/quotas", {"open_runs": 5}
    expect_problem(client.put(path, json=wanted), 403)
    key = create_named_key(embedded_database, None, "root", ["admin"], utc_now())[1]
    headers = {"Authorization": f"Bearer {key}"}
    changed: dict[str, Any] = expect_json(client.put(path, json=wanted, headers=headers), 200)["quotas"]
    assert (changed["open_runs"], changed["keys"]) == (5, Quotas().keys)
