"""Labels are limited in number and size, so that a stop event always fits a receiver's limit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.store import tables
from evalstop_service.store.database import Database

from tests.security.served_project import serve_project
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem
from tests.service.web.api.routes import ENDPOINT

EVENT_BYTES = 64 * 1024


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    """A client of a project with a subscription to all events."""
    with serve_project(database) as project:
        client = project.open_client(path="")
        expect_json(client.post("/api/v1/endpoints", json=ENDPOINT), 201)
        yield client


def build_label(index: int, length: int) -> dict[str, str]:
    return {f"label-{index:04}": "x" * length}


def build_labels(start: int, count: int, length: int) -> dict[str, str]:
    return {key: value for index in range(start, start + count) for key, value in build_label(index, length).items()}


def test_merged_labels_are_limited_to_500(client: httpx.Client) -> None:
    """Reopening a run with more labels is a 422 that names the limit."""
    for start in range(0, 500, 100):
        body = {"name": "r", "labels": build_labels(start, 100, 10)}
        assert client.post("/api/v1/runs", json=body).status_code < 300
    body = {"name": "r", "labels": build_labels(500, 100, 10)}
    refused = expect_problem(client.post("/api/v1/runs", json=body), 422)
    assert "500" in refused["detail"]


def test_merged_labels_are_limited_to_256_kib(client: httpx.Client) -> None:
    """Reopening a run with larger labels is a 422 that names the limit."""
    responses = [
        client.post("/api/v1/runs", json={"name": "r", "labels": build_labels(start, 50, 1900)})
        for start in range(0, 200, 50)
    ]
    assert "256 KiB" in expect_problem(responses[-1], 422)["detail"]


def test_tags_over_the_size_limit_are_dropped(client: httpx.Client, database: Database) -> None:
    """MLflow tags that exceed the labels' limit are left out, and the request succeeds."""
    experiment = {"experiment_id": "0", "run_name": "r"}
    run = client.post("/mlflow/api/2.0/mlflow/runs/create", json=experiment).json()["run"]["info"]["run_id"]
    for start in range(0, 400, 100):
        tags = [{"key": key, "value": value} for key, value in build_labels(start, 100, 2000).items()]
        logged = client.post("/mlflow/api/2.0/mlflow/runs/log-batch", json={"run_id": run, "tags": tags})
        assert logged.status_code == 200, logged.text
    with database.reading() as tx:
        stored_labels = tx.execute(sa.select(tables.runs.c.labels)).scalars().all()
    assert all(len(json.dumps(labels)) <= 256 * 1024 + 10_000 for labels in stored_labels)


def test_stop_event_stays_under_64_kib(client: httpx.Client, database: Database) -> None:
    """Even with the most labels the event is smaller, and keeps the labels of the run's job."""
    terms = {"name": "r", "mode": "enforce"}
    run = expect_json(client.post("/api/v1/runs", json=terms | {"labels": {"slurm_job_id": "4711"}}), 201)["id"]
    for start in range(0, 90, 30):
        body = terms | {"labels": build_labels(start, 30, 2000)}
        assert client.post("/api/v1/runs", json=body).status_code < 300
    expect_json(client.post(f"/api/v1/runs/{run}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    expect_json(client.post(f"/api/v1/runs/{run}/observations", json={"observations": FALLING}), 200)
    with database.reading() as tx:
        bodies = tx.execute(sa.select(tables.events.c.body)).scalars().all()
    assert any("run.stop_requested" in body for body in bodies)
    for body in bodies:
        assert len(body.encode()) < EVENT_BYTES
        assert json.loads(body)["data"]["run"]["labels"]["slurm_job_id"] == "4711"
