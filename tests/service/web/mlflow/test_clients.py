"""Unmodified MLflow clients, each in its own process, with only an address and a key in the environment."""

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

# One database is enough: what clients send does not depend on it.
pytestmark = [pytest.mark.real, pytest.mark.timeout(600), *ON_SQLITE]

TRAINERS = Path(__file__).parent / "trainers"
TIMEOUT_SECONDS = 560

RUN_EACH_TRAINER = """
import gc, runpy, sys
from pathlib import Path
gc.set_threshold(100_000, 20, 20)  # collections would take a tenth of the time: what is imported is never freed

for trainer in map(Path, sys.argv[1:]):
    print(f"trainer: {trainer.stem}")
    runpy.run_path(str(trainer), run_name="__main__")
"""
TRAINER_NAMES = ("lightning_module", "optuna_study", "artifacts_and_models", "fluent", "transformers_trainer")
"""The last one sets an experiment for whatever runs after it in its process."""

RunsByTrainer = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(service: Service, tmp_path_factory: pytest.TempPathFactory) -> RunsByTrainer:
    """The runs that each trainer printed, from the service's own API; one process imports what all trainers need."""
    key = service.create_key(service.create_project())
    command = [sys.executable, "-c", RUN_EACH_TRAINER, *(str(TRAINERS / f"{name}.py") for name in TRAINER_NAMES)]
    folder = tmp_path_factory.mktemp("trainers")
    result = subprocess.run(
        command,
        env=build_environment(service, key),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-6000:]}"
    client = service.open_client_with_key(key)
    runs_by_trainer = {}
    for part in result.stdout.split("trainer: ")[1:]:
        name, *lines = part.splitlines()
        ids = [line for line in lines if len(line) == 32 and line.isalnum()]
        assert ids, part
        runs_by_trainer[name] = [get_run_with_series(client, run_id) for run_id in ids]
    return runs_by_trainer


def build_environment(service: Service, key: str) -> dict[str, str]:
    """The environment of a client."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTEST"))}
    return environment | {
        "MLFLOW_TRACKING_URI": f"{service.url}/mlflow",
        "MLFLOW_TRACKING_TOKEN": key,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        # To list a model's requirements MLflow imports all of them again, for up to two minutes; then it assumes some.
        "MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_MLFLOW_LOG_ARTIFACTS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def get_run_with_series(client: httpx.Client, run_id: str) -> dict[str, Any]:
    document: dict[str, Any] = client.get(f"/runs/{run_id}").raise_for_status().json()
    series = {}
    for metric in document["metrics"]:
        page = client.get(f"/runs/{run_id}/observations", params={"metric": metric}).raise_for_status().json()
        series[metric] = [(item["step"], item["value"]) for item in page["items"]]
    return document | {"series": series}


def test_fluent_api_run_is_recognized_and_stopped(runs: RunsByTrainer) -> None:
    """Roles are recognized by name, the first value counts, and the run is stopped, also with asynchronous logging."""
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


def test_transformers_trainer_is_recorded(runs: RunsByTrainer) -> None:
    """Every eval has its step, the arguments are params, and the run is completed."""
    (run,) = runs["transformers_trainer"]
    eval_metric = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert eval_metric == "eval_accuracy"
    assert [step for step, _ in run["series"][eval_metric]] == [2, 4, 6]
    assert run["params"]["max_steps"] == "6"
    assert run["status"] == "completed"


def test_lightning_logger_and_autologging_are_recorded(runs: RunsByTrainer) -> None:
    """The validation score is the eval metric, at the steps of its values."""
    run, autologged = runs["lightning_module"]
    assert run["name"] == "lines/tiny"
    assert run["recognition"]["sources"].keys() == run["metrics"].keys()
    eval_metric = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert eval_metric == "val_accuracy"
    assert len(run["series"][eval_metric]) == 3
    assert run["status"] == "completed"
    assert autologged["name"].startswith("autologged/")
    assert autologged["status"] == "completed"
    assert len(autologged["series"]["val_accuracy"]) == 2


def test_optuna_trials_are_runs_of_one_experiment(runs: RunsByTrainer) -> None:
    """Each trial is a run of the study's experiment, with its parameters."""
    trials = runs["optuna_study"]
    assert len(trials) == 3
    assert {run["labels"]["mlflow.experiment"] for run in trials} == {"widths"}
    assert all("x" in run["params"] for run in trials)


def test_unsupported_calls_do_not_fail_the_job(runs: RunsByTrainer) -> None:
    """Trackers, 568 params, artifacts, models, inputs and searches leave room for the job's tags."""
    (run,) = runs["artifacts_and_models"]
    assert (run["name"], run["status"], len(run["params"])) == ("scripts/ppo", "completed", 569)
    assert run["labels"]["slurm_job_id"] == "4711"


TRAINER_UNDER_A_RECEIVER = """
import mlflow, time

with mlflow.start_run(run_name="guarded") as run:
    mlflow.log_metric("eval_accuracy", 0.5, step=1)
    print(run.info.run_id, flush=True)
    while True:
        time.sleep(0.1)
"""


def test_stop_reaches_an_mlflow_job_under_a_receiver(service: Service, tmp_path: Path) -> None:
    """A stop finds the job that `evalstop-receiver process` started by the tag that it set."""
    key = service.create_key(service.create_project())
    ready = tmp_path / "ready.json"
    command = [
        *(sys.executable, "-m", "evalstop_client.receivers.cli", "process", "--url", service.url),
        *("--ready-file", str(ready), "--", sys.executable, "-c", TRAINER_UNDER_A_RECEIVER),
    ]
    secrets = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": key}
    with running_program(command, **build_environment(service, key), **secrets) as process:
        assert process.stdout is not None
        run_id = next(line.strip() for line in process.stdout if len(line.strip()) == 32)
        run = service.open_client_with_key(key).get(f"/runs/{run_id}").raise_for_status().json()
        assert post_event(json.loads(ready.read_text())["url"], make_stop_event(run["labels"])).status_code == 202
        assert process.wait(60) == 128 + signal.SIGTERM
