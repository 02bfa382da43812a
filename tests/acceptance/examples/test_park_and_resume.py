"""A healthy run with a temporary dip is parked, resumed by a person, and ends better than before."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_lab.service_process import Service

from tests.acceptance.examples.conftest import open_api
from tests.acceptance.examples.programs import EXAMPLES, run_example
from tests.clients.programs import wait_until

pytestmark = [pytest.mark.real, pytest.mark.nightly]

NAME = "park-and-resume"
EVENT_TYPES = ["run.park_requested", "run.resume_requested", "run.stop_requested"]


def test_parked_run_resumes_and_improves(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """The receiver parks the job and resumes it on request; the run ends with a better checkpoint than when parked."""
    secret, ready = tmp_path / "secret", tmp_path / "ready.json"
    secret.write_text("whsec_bm90IHlldCBrbm93biwgdGhpcyBpcyBhIHBsYWNl")
    command = ["evalstop-receiver", "process", "--restartable", "--secret-file", str(secret)]
    command += ["--ready-file", str(ready), "--job-key-env", "TRAINER_KEY"]
    command += ["--", sys.executable, str(EXAMPLES / "park_and_resume.py")]
    with (
        open_api(service) as api,
        subprocess.Popen(
            command,
            env=environment | {"TRAINER_KEY": service.key},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        ) as receiver,
    ):
        try:
            wait_until(ready.exists, 60.0)
            endpoint = {"url": json.loads(ready.read_text())["url"], "event_types": EVENT_TYPES}
            secret.write_text(api.post("/endpoints", json=endpoint).raise_for_status().json()["secret"])
            parked = wait_until(lambda: find_run(api, "parked"), 120.0)
            decision = parked["decision"]
            assert (decision["action"], decision["state"], parked["should_stop"]) == ("park", "parked", False)
            assert parked["last_step"] < parked["total_steps"]
            body = {"reason": "the learning rate was raised, so a dip was expected"}
            api.post(f"/decisions/{decision['id']}/undo", json=body).raise_for_status()
            output, _ = receiver.communicate(timeout=200)
        finally:
            receiver.send_signal(signal.SIGTERM)
        completed = wait_until(lambda: find_run(api, "completed"), 60.0)
    assert receiver.returncode == 0
    assert re.search(r"resumed at step \d+", output), "the job did not resume from its checkpoint"
    assert "completed" in output
    assert completed["last_step"] == completed["total_steps"]
    assert completed["decision"]["id"] == decision["id"], "the run was parked again after a person resumed it"
    assert completed["best_checkpoint"]["score"] < parked["best_checkpoint"]["score"], (
        "the eval is a loss, so lower is better"
    )


def test_finished_example_can_be_started_again(environment: dict[str, str], tmp_path: Path) -> None:
    """It ends at once, and does not take the checkpoints of another example in the same folder for its own."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "99950.json").write_text(json.dumps([0.0] * 40))
    command = [sys.executable, str(EXAMPLES / "park_and_resume.py")]
    first, second = (run_example(command, environment | {"EXAMPLE_PAUSE": "0"}, tmp_path) for _ in range(2))
    assert "resumed" not in first
    assert "resumed at step 1500" in second
    assert first.splitlines()[-1] == second.splitlines()[-1]


def find_run(api: httpx.Client, status: str) -> dict[str, Any]:
    """The example's run in this status; empty if there is none."""
    runs = api.get("/runs", params={"name": NAME}).raise_for_status().json()["items"]
    return next((dict(run) for run in runs if run["status"] == status), {})
