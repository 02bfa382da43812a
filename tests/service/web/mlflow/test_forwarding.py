"""Passing on to an MLflow server: everything, in order, beside; and what happens when it is away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
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
from evalstop_service.web.mlflow.labels import FORWARDED_RUN
from pydantic import SecretStr, ValidationError

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.service.web.mlflow.fake_mlflow import FakeMlflow, fake_mlflow

SECONDS = 30.0


@pytest.fixture
def fake() -> Iterator[FakeMlflow]:
    with fake_mlflow() as server:
        yield server


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


def opened(database: Database, project: str = "p", **labels: str) -> Run:
    """A run in a project of its own."""
    found = create_project(database, project, "shadow", 0.0, utc_now(), "paper")
    return open_run.open_run(database, found.id, open_run.OpenRequest("r", labels=labels), utc_now())[0]


def tag(run: Run, key: str, value: str = "v") -> ForwardedRequest:
    return ForwardedRequest(run.project_id, run.id, "runs/set-tag", json.dumps({"key": key, "value": value}).encode())


def counted(service_metrics: ServiceMetrics, result: str) -> float:
    return (
        service_metrics.registry.get_sample_value("evalstop_mlflow_forwarded_requests_total", {"result": result}) or 0.0
    )


def test_everything_is_passed_on(embedded_database: Database, fake: FakeMlflow) -> None:
    """A run gets a twin in the experiment of the same name, and what is said of it is said of the twin, in order."""
    project = create_project(embedded_database, "p", "shadow", 0.0, utc_now(), "paper")
    _, key = api_keys.create_named_key(embedded_database, project.name, "k", ("ingest", "read"), utc_now())
    settings = Settings(mlflow_forward_url=fake.url, mlflow_forward_token=SecretStr("t"))
    headers = {"Authorization": f"Bearer {key}"}
    with start_server(embedded_database, settings) as url:
        with httpx.Client(base_url=f"{url}/mlflow/api/2.0/mlflow/", headers=headers, trust_env=False) as client:

            def said(verb: str, body: dict[str, Any]) -> dict[str, Any]:
                document: dict[str, Any] = client.post(verb, json=body).raise_for_status().json()
                return document

            experiment_id = said("experiments/create", {"name": "a"})["experiment_id"]
            run_id = said("runs/create", {"experiment_id": experiment_id, "run_name": "r"})["run"]["info"]["run_id"]
            metric = {"key": "m", "value": "NaN", "step": 3, "timestamp": 5}
            of_model = metric | {"model_id": "m-1"}  # which the other server does not have
            said("runs/log-batch", {"run_id": run_id, "metrics": [of_model], "params": [{"key": "p", "value": "v"}]})
            said("runs/set-tag", {"run_id": run_id, "key": "unwanted", "value": "v"})
            said("runs/update", {"run_id": run_id, "status": "FINISHED", "end_time": 7})
        until(lambda: bool(fake.told) and fake.told[-1][0] == "runs/update")
        counts = httpx.get(f"{url}/metrics", trust_env=False).text
    assert 'evalstop_mlflow_forwarded_requests_total{result="refused"} 1.0' in counts
    verbs = [verb for verb, _ in fake.told]
    before = ["experiments/create", "runs/create"]
    assert verbs == [*before, "runs/log-batch", "runs/set-tag", "runs/update"]
    created, batch, updated = fake.told[1][1], fake.told[2][1], fake.told[4][1]
    assert (created["experiment_id"], created["run_name"]) == ("1", "r")
    assert {"key": "evalstop.run_id", "value": str(UUID(run_id))} in created["tags"]
    assert (batch["run_id"], batch["metrics"]) == ("twin-1", [metric])
    assert (updated["run_id"], updated["status"], updated["end_time"]) == ("twin-1", "FINISHED", 7)
    assert fake.tokens == {"Bearer t"}


def test_away(embedded_database: Database, fake: FakeMlflow) -> None:
    """While the other server is away nobody waits; what fits is passed on once it is back, what does not is counted."""
    run, service_metrics = opened(embedded_database), ServiceMetrics()
    fake.away.set()
    tee = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics, max_queued=2)
    tee.enqueue(tag(run, "0"))
    until(lambda: bool(fake.tokens))  # it is being sent, and waits no more
    for number in range(1, 6):
        tee.enqueue(tag(run, str(number)))
    assert counted(service_metrics, "dropped") == 3
    fake.away.clear()
    until(lambda: counted(service_metrics, "sent") == 3)
    tee.close()
    assert [body["key"] for verb, body in fake.told if verb == "runs/set-tag"] == ["0", "1", "2"]
    with embedded_database.reading() as tx:
        found = runs.find_run(tx, run.project_id, run.id)
    assert found is not None
    assert found.labels[FORWARDED_RUN].startswith("twin-")


def test_closing_while_it_is_away(embedded_database: Database, fake: FakeMlflow) -> None:
    """The process ends though the other server is away; what still waits is counted as dropped."""
    run, service_metrics = opened(embedded_database), ServiceMetrics()
    fake.away.set()
    tee = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics)
    for number in range(3):
        tee.enqueue(tag(run, str(number)))
    tee.close()
    assert counted(service_metrics, "dropped") == 3


def test_memory(embedded_database: Database, fake: FakeMlflow) -> None:
    """What waits is bounded by its bytes, too: few large requests are as much as many small ones."""
    run, service_metrics = opened(embedded_database), ServiceMetrics()
    fake.away.set()
    tee = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics, max_queued_bytes=10_000)
    tee.enqueue(tag(run, "0"))
    until(lambda: bool(fake.tokens))
    for number in range(1, 6):
        tee.enqueue(tag(run, str(number), "v" * 3_000))
    assert counted(service_metrics, "dropped") == 2
    fake.away.clear()
    until(lambda: counted(service_metrics, "sent") == 4)
    tee.enqueue(tag(run, "6", "v" * 9_000))  # what was sent makes room again
    until(lambda: counted(service_metrics, "sent") == 5)
    tee.close()


def test_one_that_always_fails(embedded_database: Database, fake: FakeMlflow) -> None:
    """A request that the other server fails at each time is given up, and does not hold up what comes after it."""
    run, service_metrics = opened(embedded_database), ServiceMetrics()
    tee = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics, first_pause_seconds=0.01)
    tee.enqueue(tag(run, "deadly"))
    tee.enqueue(tag(run, "after"))
    until(lambda: counted(service_metrics, "sent") == 1)
    tee.close()
    assert counted(service_metrics, "refused") == 1
    assert [body["key"] for verb, body in fake.told if verb == "runs/set-tag"][-1] == "after"


def test_moved(embedded_database: Database, fake: FakeMlflow) -> None:
    """A redirect is not followed: the token is for the server that was named and for no other."""
    run, service_metrics = opened(embedded_database), ServiceMetrics()
    with fake_mlflow() as other:
        fake.moved = other.url
        tee = Forwarder(fake.url, "t", embedded_database, utc_now, service_metrics)
        tee.enqueue(tag(run, "0"))
        until(lambda: counted(service_metrics, "refused") == 1)
        tee.close()
    assert (fake.tokens, other.tokens) == ({"Bearer t"}, set())


def test_twins_are_not_shared(embedded_database: Database, fake: FakeMlflow) -> None:
    """Nobody reaches the twin of another project's run: by its id here, or by naming it in a label of their own."""
    run, service_metrics = opened(embedded_database), ServiceMetrics()
    tee = Forwarder(fake.url, None, embedded_database, utc_now, service_metrics)
    tee.enqueue(tag(run, "own"))
    until(lambda: counted(service_metrics, "sent") == 1)
    other = opened(embedded_database, "q", **{FORWARDED_RUN: "twin-1"})
    tee.enqueue(tag(other, "foreign"))
    tee.enqueue(ForwardedRequest(other.project_id, run.id, "runs/delete", b"{}"))
    until(lambda: counted(service_metrics, "refused") == 2)
    tee.close()
    again = Forwarder(
        fake.url, None, embedded_database, utc_now, service_metrics
    )  # as another process, which knows no twin yet
    again.enqueue(tag(run, "again"))
    until(lambda: counted(service_metrics, "sent") == 2)
    again.close()
    said = [(verb, body["key"], body["run_id"]) for verb, body in fake.told if verb == "runs/set-tag"]
    assert said == [("runs/set-tag", "own", "twin-1"), ("runs/set-tag", "again", "twin-1")]
    assert fake.runs.keys() == {"twin-1"}


@pytest.mark.parametrize("url", ["mlflow:5000", "ftp://m", "http://user:password@m", "http://m?x=y", "http://"])
def test_bad_address(url: str) -> None:
    """An address that is none, or that holds a password, is refused at the start."""
    with pytest.raises(ValidationError, match="http://HOST"):
        Settings(mlflow_forward_url=url)
