"""A suspect is parked on a real Slurm: who waits goes first, the suspect recovers on idle GPUs and completes."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from evalstop_lab.service_process import running_service

from tests.acceptance.examples.test_examples import EXAMPLES
from tests.clients.programs import wait_until
from tests.clients.receivers.slurm.deployment import PATIENCE_SECONDS, Job, Stage, staged
from tests.fixtures.slurm import SlurmCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_a_suspect_gives_way_recovers_and_completes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Parked in its dip, it goes on from its checkpoint where nobody waits, returns by itself, and ends better."""
    with running_service(tmp_path / "service") as service, staged(cluster, service, tmp_path) as stage:
        stage.listening_receiver("receiver", "--park-partition", "low")
        folder = tmp_path / "suspect"
        folder.mkdir()
        script = f"cd {folder} && exec {sys.executable} {EXAMPLES / 'park_and_resume.py'}"
        suspect = stage.batch("suspect", script, gpus=2, EXAMPLE_PAUSE="0.02")
        wait_until(lambda: stage.run(suspect), PATIENCE_SECONDS)
        waiting = stage.batch("waiting", "sleep 2", gpus=2)

        parked = find_run(stage, suspect, "parked")
        wait_until(lambda: cluster.get_job_state(waiting.id) == "COMPLETED", PATIENCE_SECONDS)
        assert cluster.get_job_state(suspect.id) == "PENDING"
        cluster.start_requeued_job(suspect.id)
        find_run(stage, suspect, "running")  # it has recovered, and is asked back into its own partition
        wait_until(lambda: place(cluster, suspect) == ("PENDING", "gpu"), PATIENCE_SECONDS)
        cluster.start_requeued_job(suspect.id)
        completed = find_run(stage, suspect, "completed")
        wait_until(
            lambda: cluster.get_job_state(suspect.id) == "COMPLETED", PATIENCE_SECONDS
        )  # it has written its output
        output = (folder / "output").read_text()
        history = stage.api.get(f"/decisions/{parked['decision']['id']}").raise_for_status().json()["history"]
    assert "resumed at step" in output
    assert [change["state"] for change in history][-2:] == ["parked", "undone"]
    assert history[-1]["actor"] == "policy reversible version 1"
    assert completed["best_checkpoint"]["score"] < parked["best_checkpoint"]["score"], "its eval is a loss"
    began, gone = (datetime.fromisoformat(history[i]["at"]) for i in (0, -2))
    print(f"{(gone - began).total_seconds():.2f} s from the decision to the freed GPUs")


def place(cluster: SlurmCluster, job: Job) -> tuple[str, ...]:
    """The state of a job and its partition."""
    return tuple(cluster.run_command("squeue", "--noheader", "--format=%T %P", f"--jobs={job.id}").split())


def find_run(stage: Stage, job: Job, status: str) -> dict[str, Any]:
    """A job's run once it has this status."""

    def look() -> dict[str, Any]:
        run = stage.run(job) or {}
        return run if run.get("status") == status else {}

    return wait_until(look, 2 * PATIENCE_SECONDS)
