"""Unmodified clients, each in a process of its own: an address and a key in the environment are all they get."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.web.api.conftest import Service

pytestmark = pytest.mark.real

TRAINERS = Path(__file__).parent / "trainers"
SECONDS = 240

Train = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def train(service: Service, tmp_path: Path) -> Train:
    """Runs a trainer to its end; the runs that it printed, as the service's own API answers them."""
    if service.database.embedded is False:
        pytest.skip("one database will do for clients: what they send is the same")
    key = service.key(service.project())
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTEST"))}
    environment |= {
        "MLFLOW_TRACKING_URI": f"{service.url}/mlflow",
        "MLFLOW_TRACKING_TOKEN": key,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(name: str) -> list[dict[str, Any]]:
        command = [sys.executable, str(TRAINERS / name), str(tmp_path)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        ids = [line for line in done.stdout.splitlines() if len(line) == 32 and line.isalnum()]
        assert ids, done.stdout
        client = service.client(key)
        return [watched(client, run_id) for run_id in ids]

    return run


def watched(client: httpx.Client, run_id: str) -> dict[str, Any]:
    document: dict[str, Any] = client.get(f"/runs/{run_id}").raise_for_status().json()
    series = {}
    for metric in document["metrics"]:
        page = client.get(f"/runs/{run_id}/observations", params={"metric": metric}).raise_for_status().json()
        series[metric] = [(item["step"], item["value"]) for item in page["items"]]
    return document | {"series": series}


def test_fluent(train: Train) -> None:
    """MLflow's fluent API, its asynchronous logging included: roles by name, the first value, a stop."""
    (run,) = train("fluent.py")
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


def test_transformers(train: Train) -> None:
    """transformers' Trainer: every eval at its step, its arguments as labels, and its end."""
    (run,) = train("transformers_trainer.py")
    gold = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert gold == "eval_accuracy"
    assert [step for step, _ in run["series"][gold]] == [2, 4, 6]
    assert run["labels"]["params.max_steps"] == "6"
    assert run["status"] == "completed"


def test_lightning(train: Train) -> None:
    """Lightning's MLFlowLogger: the validation score is gold, at the steps that it was logged at."""
    (run,) = train("lightning_module.py")
    assert run["name"] == "lines/tiny"
    assert run["recognition"]["sources"].keys() == run["metrics"].keys()
    gold = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert gold == "val_accuracy"
    assert len(run["series"][gold]) == 3
    assert run["status"] == "completed"


def test_optuna(train: Train) -> None:
    """Optuna's callback: each trial is a run of the study's experiment, with its parameters."""
    runs = train("optuna_study.py")
    assert len(runs) == 3
    assert {run["labels"]["mlflow.experiment"] for run in runs} == {"widths"}
    assert all("params.x" in run["labels"] for run in runs)
