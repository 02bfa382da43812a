"""A trainer cannot make its run unstoppable: labels are bounded, and an event always fits a receiver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem

EVENT_BYTES = 64 * 1024


@contextmanager
def connected(database: Database, veto_window_seconds: float = 0.0) -> Iterator[httpx.Client]:
    """A client of a service with one project, which has an endpoint for all events."""
    project = create_project(database, "p", "enforce", veto_window_seconds, utc_now(), "paper")
    with database.transaction() as tx:
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=EVERY_EVENT, now=utc_now())
    key = api_keys.create_named_key(database, "p", "k", ["admin"], utc_now())[1]
    headers = {"Authorization": f"Bearer {key}"}
    with (
        start_server(database) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client,
    ):
        yield client


def label(index: int, length: int) -> dict[str, str]:
    return {f"label-{index:04}": "x" * length}


def many_labels(start: int, count: int, length: int) -> dict[str, str]:
    return {key: value for index in range(start, start + count) for key, value in label(index, length).items()}


def test_labels_that_are_merged_are_bounded_by_number(database: Database) -> None:
    """However often a run is opened with others, it has 500 labels at most, and the answer says so."""
    with connected(database) as client:
        for start in range(0, 500, 100):
            body = {"name": "r", "labels": many_labels(start, 100, 10)}
            assert client.post("/api/v1/runs", json=body).status_code < 300
        body = {"name": "r", "labels": many_labels(500, 100, 10)}
        refused = expect_problem(client.post("/api/v1/runs", json=body), 422)
        assert "500" in refused["detail"]


def test_labels_that_are_merged_are_bounded_by_size(database: Database) -> None:
    """The labels of a run hold 256 KiB at most."""
    with connected(database) as client:
        statuses = [
            client.post("/api/v1/runs", json={"name": "r", "labels": many_labels(start, 50, 1900)})
            for start in range(0, 200, 50)
        ]
        assert "256 KiB" in expect_problem(statuses[-1], 422)["detail"]


def test_tags_are_bounded_by_size(database: Database) -> None:
    """Tags of MLflow stay within the same bounds; those that do not fit are left out."""
    with connected(database) as client:
        experiment = {"experiment_id": "0", "run_name": "r"}
        run = client.post("/mlflow/api/2.0/mlflow/runs/create", json=experiment).json()["run"]["info"]["run_id"]
        for start in range(0, 400, 100):
            tags = [{"key": key, "value": value} for key, value in many_labels(start, 100, 2000).items()]
            logged = client.post("/mlflow/api/2.0/mlflow/runs/log-batch", json={"run_id": run, "tags": tags})
            assert logged.status_code == 200, logged.text
        with database.reading() as tx:
            found = tx.execute(sa.select(tables.runs.c.labels)).scalars().all()
        assert all(len(json.dumps(labels)) <= 256 * 1024 + 10_000 for labels in found)


def test_an_event_always_fits_a_receiver(database: Database) -> None:
    """A stop of a run with as many labels as there may be holds less than 64 KiB, and keeps those of its job."""
    with connected(database) as client:
        terms = {"name": "r", "mode": "enforce"}
        run = expect_json(client.post("/api/v1/runs", json=terms | {"labels": {"slurm_job_id": "4711"}}), 201)["id"]
        for start in range(0, 90, 30):
            body = terms | {"labels": many_labels(start, 30, 2000)}
            assert client.post("/api/v1/runs", json=body).status_code < 300
        expect_json(client.post(f"/api/v1/runs/{run}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
        expect_json(client.post(f"/api/v1/runs/{run}/observations", json={"observations": FALLING}), 200)
        with database.reading() as tx:
            bodies = tx.execute(sa.select(tables.events.c.body)).scalars().all()
        assert any("run.stop_requested" in body for body in bodies)
        for body in bodies:
            assert len(body.encode()) < EVENT_BYTES
            assert json.loads(body)["data"]["run"]["labels"]["slurm_job_id"] == "4711"
