"""Forwarding to an MLflow server: in order, without delaying clients, and limited while it is unavailable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.ingest import open_run
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store import runs
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from evalstop_service.web.mlflow.forwarding import ForwardedRequest, Forwarder
from evalstop_service.web.mlflow.requests import FORWARDED_RUN
from pydantic import SecretStr, ValidationError

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.service.concurrency import wait_until
from tests.service.web.mlflow.fake_mlflow import FakeMlflow, run_fake_mlflow


@pytest.fixture
def fake() -> Iterator[FakeMlflow]:
    with run_fake_mlflow() as server:
        yield server


def open_run_in_project(database: Database, project: str = "p", **labels: str) -> Run:
    """A run in a new project."""
    created = create_project(database, project, "shadow", 0.0, utc_now(), "paper")
    return open_run.open_run(database, created.id, open_run.OpenRequest("r", labels=labels), utc_now())[0]


def build_set_tag(run: Run, key: str, value: str = "v") -> ForwardedRequest:
    return ForwardedRequest(run.project_id, run.id, "runs/set-tag", json.dumps({"key": key, "value": value}).encode())


def count_requests(service_metrics: ServiceMetrics, result: str) -> float:
    name = "evalstop_mlflow_forwarded_requests_total"
    return service_metrics.registry.get_sample_value(name, {"result": result}) or 0.0


def test_requests_are_forwarded_in_order(embedded_database: Database, fake: FakeMlflow) -> None:
    """A run is created in the experiment of the same name on the other server, and its requests follow in order."""
    project = create_project(embedded_database, "p", "shadow", 0.0, utc_now(), "paper")
    _, key = api_keys.create_named_key(embedded_database, project.name, "k", ("ingest", "read"), utc_now())
    settings = Settings(mlflow_forward_url=fake.url, mlflow_forward_token=SecretStr("t"))
    headers = {"Authorization": f"Bearer {key}"}
    with start_server(embedded_database, settings) as url:
        with httpx.Client(
            base_url=f"{url}/mlflow/api/2.0/mlflow/", headers=headers, trust_env=False, timeout=60
        ) as client:

            def post(verb: str, body: dict[str, Any]) -> dict[str, Any]:
                document: dict[str, Any] = client.post(verb, json=body).raise_for_status().json()
                return document

            experiment_id = post("experiments/create", {"name": "a"})["experiment_id"]
            run_id = post("runs/create", {"experiment_id": experiment_id, "run_name": "r"})["run"]["info"]["run_id"]
            metric = {"key": "m", "value": "NaN", "step": 3, "timestamp": 5}
            model_metric = metric | {"model_id": "m-1"}  # the other server has no such model
            post(
                "runs/log-batch", {"run_id": run_id, "metrics": [model_metric], "params": [{"key": "p", "value": "v"}]}
            )
            post("runs/set-tag", {"run_id": run_id, "key": "refused", "value": "v"})
            post("runs/update", {"run_id": run_id, "status": "FINISHED", "end_time": 7})
        wait_until(lambda: bool(fake.requests) and fake.requests[-1][0] == "runs/update")
        counts = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    assert 'evalstop_mlflow_forwarded_requests_total{result="refused"} 1.0' in counts
    verbs = [verb for verb, _ in fake.requests]
    before = ["experiments/create", "runs/create"]
    assert verbs == [*before, "runs/log-batch", "runs/set-tag", "runs/update"]
    created, batch, updated = fake.requests[1][1], fake.requests[2][1], fake.requests[4][1]
    assert (created["experiment_id"], created["run_name"]) == ("1", "r")
    assert {"key": "evalstop.run_id", "value": str(UUID(run_id))} in created["tags"]
    assert (batch["run_id"], batch["metrics"]) == ("forwarded-1", [metric])
    assert (updated["run_id"], updated["status"], updated["end_time"]) == ("forwarded-1", "FINISHED", 7)
    assert fake.tokens == {"Bearer t"}


def test_requests_are_queued_while_the_server_is_unavailable(embedded_database: Database, fake: FakeMlflow) -> None:
    """Clients are not delayed; what fits in the queue is sent once it is back, and the rest is counted as dropped."""
    run, service_metrics = open_run_in_project(embedded_database), ServiceMetrics()
    fake.unavailable.set()
    forwarder = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics, max_queued=2)
    forwarder.enqueue(build_set_tag(run, "0"))
    wait_until(lambda: bool(fake.tokens))  # it is being sent, and is no longer queued
    for number in range(1, 6):
        forwarder.enqueue(build_set_tag(run, str(number)))
    assert count_requests(service_metrics, "dropped") == 3
    fake.unavailable.clear()
    wait_until(lambda: count_requests(service_metrics, "sent") == 3)
    forwarder.close()
    assert [body["key"] for verb, body in fake.requests if verb == "runs/set-tag"] == ["0", "1", "2"]
    with embedded_database.reading() as tx:
        stored_run = runs.load_run(tx, run.project_id, run.id)
    assert stored_run.labels[FORWARDED_RUN].startswith("forwarded-")


def test_close_drops_queued_requests(embedded_database: Database, fake: FakeMlflow) -> None:
    """The process ends while the other server is unavailable, and counts what was queued."""
    run, service_metrics = open_run_in_project(embedded_database), ServiceMetrics()
    fake.unavailable.set()
    forwarder = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics)
    for number in range(3):
        forwarder.enqueue(build_set_tag(run, str(number)))
    forwarder.close()
    assert count_requests(service_metrics, "dropped") == 3


def test_queue_is_limited_by_bytes(embedded_database: Database, fake: FakeMlflow) -> None:
    """A few large requests fill the queue, and sent ones make room again."""
    run, service_metrics = open_run_in_project(embedded_database), ServiceMetrics()
    fake.unavailable.set()
    forwarder = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics, max_queued_bytes=10_000)
    forwarder.enqueue(build_set_tag(run, "0"))
    wait_until(lambda: bool(fake.tokens))
    for number in range(1, 6):
        forwarder.enqueue(build_set_tag(run, str(number), "v" * 3_000))
    assert count_requests(service_metrics, "dropped") == 2
    fake.unavailable.clear()
    wait_until(lambda: count_requests(service_metrics, "sent") == 4)
    forwarder.enqueue(build_set_tag(run, "6", "v" * 9_000))  # sent requests made room
    wait_until(lambda: count_requests(service_metrics, "sent") == 5)
    forwarder.close()


def test_request_that_always_fails_is_given_up(embedded_database: Database, fake: FakeMlflow) -> None:
    """The requests after it are sent."""
    run, service_metrics = open_run_in_project(embedded_database), ServiceMetrics()
    forwarder = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics, first_pause_seconds=0.01)
    forwarder.enqueue(build_set_tag(run, "failing"))
    forwarder.enqueue(build_set_tag(run, "after"))
    wait_until(lambda: count_requests(service_metrics, "sent") == 1)
    forwarder.close()
    assert count_requests(service_metrics, "refused") == 1
    assert [body["key"] for verb, body in fake.requests if verb == "runs/set-tag"][-1] == "after"


def test_redirect_is_not_followed(embedded_database: Database, fake: FakeMlflow) -> None:
    """The token is for the configured server only."""
    run, service_metrics = open_run_in_project(embedded_database), ServiceMetrics()
    with run_fake_mlflow() as other:
        fake.redirect_url = other.url
        forwarder = Forwarder(fake.url, "t", embedded_database, utc_now, service_metrics)
        forwarder.enqueue(build_set_tag(run, "0"))
        wait_until(lambda: count_requests(service_metrics, "refused") == 1)
        forwarder.close()
    assert (fake.tokens, other.tokens) == ({"Bearer t"}, set())


def test_forwarded_run_of_another_project_is_unreachable(embedded_database: Database, fake: FakeMlflow) -> None:
    """Neither the run's id nor a forged label leads another project to the forwarded run."""
    run, service_metrics = open_run_in_project(embedded_database), ServiceMetrics()
    forwarder = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics)
    forwarder.enqueue(build_set_tag(run, "own"))
    wait_until(lambda: count_requests(service_metrics, "sent") == 1)
    other = open_run_in_project(embedded_database, "q", **{FORWARDED_RUN: "forwarded-1"})
    forwarder.enqueue(build_set_tag(other, "foreign"))
    forwarder.enqueue(ForwardedRequest(other.project_id, run.id, "runs/delete", b"{}"))
    wait_until(lambda: count_requests(service_metrics, "refused") == 2)
    forwarder.close()
    # Like another process, which has no forwarded run in memory.
    second_forwarder = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics)
    second_forwarder.enqueue(build_set_tag(run, "again"))
    wait_until(lambda: count_requests(service_metrics, "sent") == 2)
    second_forwarder.close()
    requests = [(verb, body["key"], body["run_id"]) for verb, body in fake.requests if verb == "runs/set-tag"]
    assert requests == [("runs/set-tag", "own", "forwarded-1"), ("runs/set-tag", "again", "forwarded-1")]
    assert fake.runs.keys() == {"forwarded-1"}


@pytest.mark.parametrize("url", ["mlflow:5000", "ftp://m", "http://user:password@m", "http://m?x=y", "http://"])
def test_invalid_forward_url_is_refused(url: str) -> None:
    """A URL that is malformed, or contains a password, is refused at the start."""
    with pytest.raises(ValidationError, match="http://HOST"):
        Settings(mlflow_forward_url=url)
