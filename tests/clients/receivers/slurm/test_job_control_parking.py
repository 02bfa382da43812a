"""The Slurm action parks jobs of a real Slurm: held in the queue, or in a partition where nobody waits."""

from __future__ import annotations

import pytest
from evalstop_client.errors import RequestRefused
from evalstop_client.receivers import Present

from tests.clients.programs import eventually
from tests.clients.receivers.conformance import found, gone, parked, request
from tests.clients.receivers.slurm.launcher import SlurmBench

pytestmark = pytest.mark.real


def test_a_parked_job_is_held_until_it_is_resumed(bench: SlurmBench) -> None:
    """Held in the queue a job has no GPUs, and Slurm does not start it; released it may have them again."""
    started = bench.start()
    job = found(started)
    for _ in range(2):  # to park what is parked changes nothing
        started.action.park_job(job, request(started.labels))
        assert parked(started.action, job).details["parked_as"] == "held"
    assert isinstance(started.action.check_job(job), Present), "it is not gone for good"
    started.action.resume_job(job)
    bench.cluster.start_requeued_job(job.id)
    eventually(lambda: bench.cluster.get_job_state(job.id) == "RUNNING")


def test_a_parked_job_runs_where_nobody_waits_and_gives_way(bench: SlurmBench) -> None:
    """A suspect that holds all GPUs is parked: who waited runs to its end, then the suspect on idle GPUs, until others
    want them; resumed it is back in its own partition."""
    bench.park_partition = "low"
    suspect = bench.run("", "--gres=gpu:2")
    job = found(suspect)
    waiting = bench.cluster.submit_job("sleep 2", "--output=/dev/null", "--gres=gpu:2")
    bench.jobs.append(waiting)
    suspect.action.park_job(job, request(suspect.labels))
    assert parked(suspect.action, job).details["partition"] == "low"
    eventually(lambda: bench.cluster.get_job_state(waiting) == "RUNNING")
    eventually(lambda: bench.cluster.get_job_state(waiting) == "COMPLETED")
    bench.cluster.start_requeued_job(job.id)
    eventually(lambda: bench.cluster.get_job_state(job.id) == "RUNNING")
    assert parked(suspect.action, job).details["partition"] == "low", "on idle GPUs it is parked still"
    another = bench.cluster.submit_job("sleep 2", "--output=/dev/null", "--gres=gpu:2")
    bench.jobs.append(another)
    eventually(lambda: bench.cluster.get_job_state(another) == "RUNNING")
    assert bench.cluster.get_job_state(job.id) in ("PENDING", "REQUEUED", "COMPLETING")
    suspect.action.resume_job(job)
    bench.cluster.start_requeued_job(job.id)
    eventually(lambda: bench.cluster.get_job_state(job.id) == "RUNNING")
    assert bench.cluster.run_command("squeue", "--noheader", "--format=%P", f"--jobs={job.id}").strip() == "gpu"


def test_a_job_that_may_not_be_requeued_is_not_parked(bench: SlurmBench) -> None:
    """It is refused before anything is done to it."""
    started = bench.run("", "--gres=gpu:1", "--no-requeue")
    job = found(started)
    with pytest.raises(RequestRefused, match="--requeue"):
        started.action.park_job(job, request(started.labels))
    assert bench.cluster.get_job_state(job.id) == "RUNNING"


def test_a_parked_job_can_be_stopped_for_good(bench: SlurmBench) -> None:
    """A stop ends a job that is held: that it is set aside is not enough."""
    started = bench.start()
    job = found(started)
    started.action.park_job(job, request(started.labels))
    parked(started.action, job)
    again = found(started)
    assert isinstance(started.action.check_job(again), Present)
    started.action.cancel_job(again, request(started.labels))
    assert gone(started.action, again).state == "CANCELLED"
