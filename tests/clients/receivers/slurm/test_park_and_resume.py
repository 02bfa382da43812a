"""A run is parked on a real Slurm: a waiting job runs first, then the run recovers on idle GPUs and completes."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.examples.programs import EXAMPLES
from tests.clients.programs import wait_until
from tests.clients.receivers.slurm.deployment import STOP_SECONDS, Deployment, Job, deploy
from tests.fixtures.forked_service import running_service
from tests.fixtures.slurm import SlurmCluster

pytestmark = [pytest.mark.real, pytest.mark.nightly]


def test_parked_run_recovers_and_completes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A held run continues from its checkpoint when nobody waits, recovers, and ends with a better eval."""
    with running_service(tmp_path / "service") as service, deploy(cluster, service, tmp_path) as deployment:
        deployment.start_listening_receiver("receiver", "--return-idle", "1")
        suspect, folder, parked = park_while_another_runs(deployment, tmp_path)
        wait_until(lambda: "may run while nobody waits" in deployment.read_log("receiver"), STOP_SECONDS)
        cluster.start_requeued_job(suspect.id)
        completed = wait_for_status(deployment, suspect, "completed")
        history = deployment.api.get(f"/decisions/{parked['decision']['id']}").raise_for_status().json()["history"]
    assert [change["state"] for change in history][-2:] == ["parked", "undone"]
    assert history[-1]["actor"] == "policy reversible version 1"
    assert (folder / "output").read_text().count("resumed at step") == 1
    assert completed["best_checkpoint"]["score"] < parked["best_checkpoint"]["score"], (
        "the eval, a loss, did not improve"
    )
    decided, freed = (datetime.fromisoformat(history[i]["at"]) for i in (0, -2))
    print(f"{(freed - decided).total_seconds():.2f} s from the decision to the freed GPUs")


def park_while_another_runs(deployment: Deployment, tmp_path: Path) -> tuple[Job, Path, dict[str, Any]]:
    """The job of a run that is parked, so that another job could run and complete; its folder, and the run."""
    folder = tmp_path / "suspect"
    folder.mkdir()
    script = f"cd {folder} && exec {sys.executable} {EXAMPLES / 'park_and_resume.py'}"
    suspect = deployment.submit_script("suspect", script, gpus=2, EXAMPLE_PAUSE="0.02")
    wait_until(lambda: deployment.find_run(suspect), STOP_SECONDS)
    waiting = deployment.submit_script("waiting", "sleep 2", gpus=2)
    parked = wait_for_status(deployment, suspect, "parked")
    wait_until(lambda: deployment.cluster.get_job_state(waiting.id) == "COMPLETED", STOP_SECONDS)
    return suspect, folder, parked


def wait_for_status(deployment: Deployment, job: Job, status: str) -> dict[str, Any]:
    """A job's run, once it has this status."""

    def find() -> dict[str, Any]:
        run = deployment.find_run(job) or {}
        return run if run.get("status") == status else {}

    return wait_until(find, 2 * STOP_SECONDS)
