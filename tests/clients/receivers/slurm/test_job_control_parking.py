"""The Slurm job_control parks jobs of a real Slurm: held in the queue, or in a partition where nobody waits."""

from __future__ import annotations

import pytest
from evalstop_client.errors import RequestRefused
from evalstop_client.receivers import Present

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import make_stop_request, wait_until_gone, wait_until_parked
from tests.clients.receivers.slurm.launcher import SlurmLauncher

pytestmark = pytest.mark.real


def test_a_parked_job_is_held_until_it_is_resumed(launcher: SlurmLauncher) -> None:
    """Held in the queue a job has no GPUs, and Slurm does not start it; released it may have them again."""
    started = launcher.start()
    job = started.find()
    for _ in range(2):  # to park what is parked changes nothing
        started.job_control.park_job(job, make_stop_request(started.labels))
        assert wait_until_parked(started.job_control, job).details["parked_as"] == "held"
    assert isinstance(started.job_control.check_job(job), Present), "it is not gone for good"
    started.job_control.resume_job(job)
    launcher.cluster.start_requeued_job(job.id)
    wait_until(lambda: launcher.cluster.get_job_state(job.id) == "RUNNING")


def test_a_parked_job_runs_where_nobody_waits_and_gives_way(launcher: SlurmLauncher) -> None:
    """A suspect that holds all GPUs is parked: who waited runs to its end, then the suspect on idle GPUs, until others
    want them; resumed it is back in its own partition."""
    launcher.park_partition = "low"
    suspect = launcher.run("", "--gres=gpu:2")
    job = suspect.find()
    waiting = launcher.cluster.submit_job("sleep 2", "--output=/dev/null", "--gres=gpu:2")
    launcher.jobs.append(waiting)
    suspect.job_control.park_job(job, make_stop_request(suspect.labels))
    assert wait_until_parked(suspect.job_control, job).details["partition"] == "low"
    wait_until(lambda: launcher.cluster.get_job_state(waiting) == "RUNNING")
    wait_until(lambda: launcher.cluster.get_job_state(waiting) == "COMPLETED")
    launcher.cluster.start_requeued_job(job.id)
    wait_until(lambda: launcher.cluster.get_job_state(job.id) == "RUNNING")
    assert wait_until_parked(suspect.job_control, job).details["partition"] == "low", "on idle GPUs it is parked still"
    another = launcher.cluster.submit_job("sleep 2", "--output=/dev/null", "--gres=gpu:2")
    launcher.jobs.append(another)
    wait_until(lambda: launcher.cluster.get_job_state(another) == "RUNNING")
    assert launcher.cluster.get_job_state(job.id) in ("PENDING", "REQUEUED", "COMPLETING")
    suspect.job_control.resume_job(job)
    launcher.cluster.start_requeued_job(job.id)
    wait_until(lambda: launcher.cluster.get_job_state(job.id) == "RUNNING")
    assert launcher.cluster.run_command("squeue", "--noheader", "--format=%P", f"--jobs={job.id}").strip() == "gpu"


def test_a_job_that_may_not_be_requeued_is_not_parked(launcher: SlurmLauncher) -> None:
    """It is refused before anything is done to it."""
    started = launcher.run("", "--gres=gpu:1", "--no-requeue")
    job = started.find()
    with pytest.raises(RequestRefused, match="--requeue"):
        started.job_control.park_job(job, make_stop_request(started.labels))
    assert launcher.cluster.get_job_state(job.id) == "RUNNING"


def test_a_parked_job_can_be_stopped_for_good(launcher: SlurmLauncher) -> None:
    """A stop ends a job that is held: that it is set aside is not enough."""
    started = launcher.start()
    job = started.find()
    started.job_control.park_job(job, make_stop_request(started.labels))
    wait_until_parked(started.job_control, job)
    again = started.find()
    assert isinstance(started.job_control.check_job(again), Present)
    started.job_control.cancel_job(again, make_stop_request(started.labels))
    assert wait_until_gone(started.job_control, again).state == "CANCELLED"
