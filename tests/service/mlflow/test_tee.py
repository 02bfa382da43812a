"""Passing on to an MLflow server: everything, in order, beside; and what happens when it is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest
from evalstop_service import installation, opening
from evalstop_service.clock import utc_now
from evalstop_service.mlflow.tee import TWIN, Said, Tee
from evalstop_service.settings import Settings
from evalstop_service.store import runs
from evalstop_service.store.database import Database
from evalstop_service.telemetry import Telemetry
from pydantic import SecretStr, ValidationError

from tests.service.mlflow.fake_mlflow import FakeMlflow, fake_mlflow
from tests.serving import serving

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


def counted(telemetry: Telemetry, result: str) -> float:
    return telemetry.registry.get_sample_value("evalstop_mlflow_tee_requests_total", {"result": result}) or 0.0


def test_everything_is_passed_on(embedded_database: Database, fake: FakeMlflow) -> None:
    """A run gets a twin in the experiment of the same name, and what is said of it is said of the twin, in order."""
    project = installation.add_project(embedded_database, "p", "shadow", 0.0, utc_now(), "paper")
    _, key = installation.add_key(embedded_database, project.name, "k", ("ingest", "read"), utc_now())
    settings = Settings(mlflow_tee_url=fake.url, mlflow_tee_token=SecretStr("t"))
    headers = {"Authorization": f"Bearer {key}"}
    with serving(embedded_database, settings) as url:
        with httpx.Client(base_url=f"{url}/mlflow/api/2.0/mlflow/", headers=headers, trust_env=False) as client:

            def said(verb: str, body: dict[str, Any]) -> dict[str, Any]:
                document: dict[str, Any] = client.post(verb, json=body).raise_for_status().json()
                return document

            experiment_id = said("experiments/create", {"name": "a"})["experiment_id"]
            run_id = said("runs/create", {"experiment_id": experiment_id, "run_name": "r"})["run"]["info"]["run_id"]
            metric = {"key": "m", "value": "NaN", "step": 3, "timestamp": 5}
            said("runs/log-batch", {"run_id": run_id, "metrics": [metric], "params": [{"key": "p", "value": "v"}]})
            said("runs/set-tag", {"run_id": run_id, "key": "unwanted", "value": "v"})
            said("runs/update", {"run_id": run_id, "status": "FINISHED", "end_time": 7})
        until(lambda: bool(fake.told) and fake.told[-1][0] == "runs/update")
        counts = httpx.get(f"{url}/metrics", trust_env=False).text
    assert 'evalstop_mlflow_tee_requests_total{result="refused"} 1.0' in counts
    verbs = [verb for verb, _ in fake.told]
    before = ["experiments/get-by-name", "experiments/create", "runs/create"]
    assert verbs == [*before, "runs/log-batch", "runs/set-tag", "runs/update"]
    created, batch, updated = fake.told[2][1], fake.told[3][1], fake.told[5][1]
    assert (created["experiment_id"], created["run_name"]) == ("1", "r")
    assert {"key": "evalstop.run_id", "value": str(UUID(run_id))} in created["tags"]
    assert (batch["run_id"], batch["metrics"]) == ("twin-3", [metric])
    assert (updated["run_id"], updated["status"], updated["end_time"]) == ("twin-3", "FINISHED", 7)
    assert fake.tokens == {"Bearer t"}


def test_away(embedded_database: Database, fake: FakeMlflow) -> None:
    """While the other server is away nobody waits; what fits is passed on once it is back, what does not is counted."""
    project = installation.add_project(embedded_database, "p", "shadow", 0.0, utc_now(), "paper")
    run, _ = opening.open_run(embedded_database, project.id, opening.Request("r"), utc_now())
    telemetry = Telemetry()
    fake.away.set()
    tee = Tee(fake.url, None, embedded_database, utc_now, telemetry, most_waiting=2)
    tee.offer(Said(project.id, run.id, "runs/set-tag", {"key": "0", "value": "v"}))
    until(lambda: bool(fake.tokens))  # it is being sent, and waits no more
    for number in range(1, 6):
        tee.offer(Said(project.id, run.id, "runs/set-tag", {"key": str(number), "value": "v"}))
    assert counted(telemetry, "dropped") == 3
    fake.away.clear()
    until(lambda: counted(telemetry, "sent") == 3)
    tee.close()
    assert [body["key"] for verb, body in fake.told if verb == "runs/set-tag"] == ["0", "1", "2"]
    with embedded_database.reading() as tx:
        found = runs.find(tx, project.id, run.id)
    assert found is not None
    assert found.labels[TWIN].startswith("twin-")


def test_closing_while_it_is_away(embedded_database: Database, fake: FakeMlflow) -> None:
    """The process ends though the other server is away; what still waits is counted as dropped."""
    project = installation.add_project(embedded_database, "p", "shadow", 0.0, utc_now(), "paper")
    run, _ = opening.open_run(embedded_database, project.id, opening.Request("r"), utc_now())
    telemetry = Telemetry()
    fake.away.set()
    tee = Tee(fake.url, None, embedded_database, utc_now, telemetry)
    for number in range(3):
        tee.offer(Said(project.id, run.id, "runs/set-tag", {"key": str(number), "value": "v"}))
    tee.close()
    assert counted(telemetry, "dropped") == 3


@pytest.mark.parametrize("url", ["mlflow:5000", "ftp://m", "http://user:password@m", "http://m?x=y", "http://"])
def test_bad_address(url: str) -> None:
    """An address that is none, or that holds a password, is refused at the start."""
    with pytest.raises(ValidationError, match="http://HOST"):
        Settings(mlflow_tee_url=url)
