"""An unmodified MLflow client under a receiver, with only an address and a key in the environment."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.clients.programs import running_program
from tests.clients.webhooks import SECRET, make_stop_event, post_event
from tests.service.web.api.conftest import ON_SQLITE, Service

pytestmark = [pytest.mark.real, *ON_SQLITE]

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
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTEST"))}
    environment |= {"MLFLOW_TRACKING_URI": f"{service.url}/mlflow", "MLFLOW_TRACKING_TOKEN": key}
    with running_program(command, **environment, **secrets) as process:
        assert process.stdout is not None
        run_id = next(line.strip() for line in process.stdout if len(line.strip()) == 32)
        run = service.open_client_with_key(key).get(f"/runs/{run_id}").raise_for_status().json()
        assert post_event(json.loads(ready.read_text())["url"], make_stop_event(run["labels"])).status_code == 202
        assert process.wait(60) == 128 + signal.SIGTERM
