"""Unmodified clients, each in a process of its own: an address and a key in the environment are all they get."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.programs import running_program
from tests.clients.webhooks import SECRET, make_stop_event, post_event
from tests.service.web.api.conftest import ON_SQLITE, Service

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), *ON_SQLITE]  # what clients send is the same

TRAINERS = Path(__file__).parent / "trainers"
SECONDS = 560

ONE_BY_ONE = """
import runpy, sys
from pathlib import Path

for trainer in map(Path, sys.argv[1:]):
    print(f"trainer: {trainer.stem}")
    runpy.run_path(str(trainer), run_name="__main__")
"""
IN_ORDER = ("lightning_module", "optuna_study", "habits", "fluent", "transformers_trainer")
"""The last one chooses an experiment for whatever comes after it in its process."""

Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs that each trainer printed, as the service's own API answers them: one process imports what all need."""
    key = service.create_key(service.create_project())
    command = [sys.executable, "-c", ONE_BY_ONE, *(str(TRAINERS / f"{name}.py") for name in IN_ORDER)]
    folder = tmp_path_factory.mktemp("trainers")
    done = subprocess.run(
        command,
        env=client_environment(service, key),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    client = service.open_client_with_key(key)
    told = {}
    for part in done.stdout.split("trainer: ")[1:]:
        name, *lines = part.splitlines()
        ids = [line for line in lines if len(line) == 32 and line.isalnum()]
        assert ids, part
        told[name] = [watched(client, run_id) for run_id in ids]
    return told


def client_environment(service: Service, key: str) -> dict[str, str]:
    """All that a client is told."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTEST"))}
    return environment | {
        "MLFLOW_TRACKING_URI": f"{service.url}/mlflow",
        "MLFLOW_TRACKING_TOKEN": key,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        # To list a model's requirements MLflow imports all of them anew, for up to two minutes, or else assumes some.
        "MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_MLFLOW_LOG_ARTIFACTS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def watched(client: httpx.Client, run_id: str) -> dict[str, Any]:
    document: dict[str, Any] = client.get(f"/runs/{run_id}").raise_for_status().json()
    series = {}
    for metric in document["metrics"]:
        page = client.get(f"/runs/{run_id}/observations", params={"metric": metric}).raise_for_status().json()
        series[metric] = [(item["step"], item["value"]) for item in page["items"]]
    return document | {"series": series}


def test_fluent(runs: Runs) -> None:
    """MLflow's fluent API, its asynchronous logging included: roles by name, the first value, a stop."""
    (run,) = runs["fluent"]
    assert run["name"] == "alignment/ppo"
    assert {role["role"]: metric for metric, role in run["metrics"].items()} == {
        "eval": "eval_accuracy",
        "proxy": "reward",
        "kl": "kl",
        "loss": "loss",
    }
    assert run["series"]["eval_accuracy"] == [(0, 0.5), (1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6)]
    assert run["series"]["loss"] == [(0, "Infinity")]
    assert (run["status"], run["verdict"]["verdict"], run["labels"]["gpus"]) == ("completed", "stop", "8")


def test_transformers(runs: Runs) -> None:
    """transformers' Trainer: every eval at its step, its arguments as params, its checkpoints, its end."""
    (run,) = runs["transformers_trainer"]
    gold = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert gold == "eval_accuracy"
    assert [step for step, _ in run["series"][gold]] == [2, 4, 6]
    assert run["params"]["max_steps"] == "6"
    assert run["status"] == "completed"


def test_lightning(runs: Runs) -> None:
    """Lightning's MLFlowLogger and autologging: the validation score is the eval, at the steps of its values."""
    run, autologged = runs["lightning_module"]
    assert run["name"] == "lines/tiny"
    assert run["recognition"]["sources"].keys() == run["metrics"].keys()
    gold = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert gold == "val_accuracy"
    assert len(run["series"][gold]) == 3
    assert run["status"] == "completed"
    assert autologged["name"].startswith("autologged/")
    assert autologged["status"] == "completed"
    assert len(autologged["series"]["val_accuracy"]) == 2


def test_optuna(runs: Runs) -> None:
    """Optuna's callback: each trial is a run of the study's experiment, with its parameters."""
    trials = runs["optuna_study"]
    assert len(trials) == 3
    assert {run["labels"]["mlflow.experiment"] for run in trials} == {"widths"}
    assert all("x" in run["params"] for run in trials)


def test_habits(runs: Runs) -> None:
    """accelerate's tracker, 568 params, artifacts, models, inputs and searches end no job, and leave its tags room."""
    (run,) = runs["habits"]
    assert (run["name"], run["status"], len(run["params"])) == ("habits/ppo", "completed", 569)
    assert run["labels"]["slurm_job_id"] == "4711"


UNDER_A_RECEIVER = """
import mlflow, time

with mlflow.start_run(run_name="guarded") as run:
    mlflow.log_metric("eval_accuracy", 0.5, step=1)
    print(run.info.run_id, flush=True)
    while True:
        time.sleep(0.1)
"""


def test_a_job_under_a_receiver(service: Service, tmp_path: Path) -> None:
    """A stop reaches an MLflow job that `evalstop-receiver process` started, by the tag that it was given."""
    key = service.create_key(service.create_project())
    ready = tmp_path / "ready.json"
    command = [
        *(sys.executable, "-m", "evalstop_client.receivers.cli", "process", "--url", service.url),
        *("--ready-file", str(ready), "--", sys.executable, "-c", UNDER_A_RECEIVER),
    ]
    secrets = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": key}
    with running_program(command, **client_environment(service, key), **secrets) as process:
        assert process.stdout is not None
        run_id = next(line.strip() for line in process.stdout if len(line.strip()) == 32)
        run = service.open_client_with_key(key).get(f"/runs/{run_id}").raise_for_status().json()
        assert post_event(json.loads(ready.read_text())["url"], make_stop_event(run["labels"])).status_code == 202
        assert process.wait(60) == 128 + signal.SIGTERM
