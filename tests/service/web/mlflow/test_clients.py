"""Unmodified MLflow clients, with only an address and a key in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.web.api.conftest import ON_SQLITE, Service
from tests.service.web.mlflow.conftest import expect_json

pytestmark = [pytest.mark.real, pytest.mark.nightly, *ON_SQLITE]

JOB_WITH_CHECKPOINTS = """
import pathlib, sys, tempfile
import mlflow

class Policy(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input: list[str]) -> list[str]:
        return model_input

def save(folder, step):
    (folder / "model.bin").write_text(f"weights {step}")
    return str(folder)

for way in sys.argv[1:]:
    folder = pathlib.Path(tempfile.mkdtemp())
    with mlflow.start_run(run_name=way) as run:
        for step, score in enumerate([0.5, 0.9, 0.8, 0.7, 0.6], 1):
            mlflow.log_metric("eval_accuracy", score, step=step)
            if way == "folder":
                mlflow.log_artifacts(save(folder, step), f"checkpoint-{step}")
            elif way == "file":
                mlflow.log_text(f"weights {step}", f"checkpoints/step_{step}.pt")
            else:
                name = f"checkpoint-{step}" if way == "named model" else "policy"
                options = {} if way == "named model" else {"step": step}
                files = {"model_path": save(folder, step)}
                mlflow.pyfunc.log_model(name=name, python_model=Policy(), artifacts=files, **options)
        tags = mlflow.get_run(run.info.run_id).data.tags
        assert tags["evalstop.should_stop"] == "true", tags
        copy = pathlib.Path(mlflow.artifacts.download_artifacts(artifact_uri=tags["evalstop.best_checkpoint"]))
        texts = [copy] if copy.is_file() else copy.rglob("model.bin")
        print(run.info.run_id, *(text.read_text().replace(" ", "-") for text in texts), flush=True)
"""


@pytest.mark.parametrize("ways", [["folder", "file"], ["named model", "model at a step"]])
def test_unchanged_job_that_logs_its_checkpoints_is_stopped(service: Service, tmp_path: Path, ways: list[str]) -> None:
    """Folders, files, models by name and at a step are checkpoints: one is the best, and the job is to be stopped."""
    key = service.create_key(service.create_project())
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTEST"))}
    environment |= {"MLFLOW_TRACKING_URI": f"{service.url}/mlflow", "MLFLOW_TRACKING_TOKEN": key}
    environment |= {"MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT": "0", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    job = [sys.executable, "-c", JOB_WITH_CHECKPOINTS, *ways]
    output = subprocess.run(
        job, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    lines = [line.split() for line in output.stdout.splitlines() if len(line.split()[0]) == 32]
    assert len(lines) == len(ways), output.stderr[-4000:]
    api = service.open_client_with_key(key)
    for run_id, weights in lines:
        assert weights == f"weights-{expect_json(api.get(f'/runs/{run_id}'))['best_checkpoint']['step']}"
