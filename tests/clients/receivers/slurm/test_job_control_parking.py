"""SlurmJobControl parks jobs of a real Slurm: held in the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from evalstop_client.errors import RequestRefused
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.job_control import Job, Present
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.receiver import IdleReturns
from evalstop_client.receivers.stop.state_machine import Phase, Report, Stop, StopTimeouts
from evalstop_client.receivers.stop.webhooks import Receiver

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import DroppedReports, make_stop_request, wait_until_gone, wait_until_parked
from tests.clients.receivers.slurm.launcher import SlurmLauncher

pytestmark = pytest.mark.real


def test_parked_job_is_held_until_it_is_resumed(launcher: SlurmLauncher) -> None:
    """A parked job is held in the queue without GPUs; a resumed one runs again."""
    started = launcher.start()
    job = started.find()
    for _ in range(2):  # parking a parked job changes nothing
        started.job_control.park_job(job, make_stop_request(started.labels))
        assert wait_until_parked(started.job_control, job).details["parked_as"] == "held"
    assert isinstance(started.job_control.check_job(job), Present), "a parked job is not gone"
    started.job_control.resume_job(job)
    launcher.cluster.start_requeued_job(job.id)
    wait_until(lambda: launcher.cluster.get_job_state(job.id) == "RUNNING")


@pytest.mark.nightly
def test_held_job_runs_while_nobody_waits(launcher: SlurmLauncher) -> None:
    """A held job stays held while others wait, runs when nobody does, and is held again, as often as it may."""
    started = launcher.start_script("", "--gres=gpu:2")
    job, request = started.find(), make_stop_request(started.labels)
    started.job_control.park_job(job, request)
    wait_until_parked(started.job_control, job)
    journal = Journal(None)
    journal.record_stop(request, Stop(0.0, Phase.DONE, job=job, parks=True, report=Report("parked", "")))
    context = ReceiverContext(started.job_control, journal, DroppedReports(), StopTimeouts())
    returns = IdleReturns(Receiver(context, list), most=1)

    def look_until(condition: Callable[[], bool]) -> None:
        def look() -> bool:
            returns.look()
            return condition()

        wait_until(look)

    def submit_waiting() -> str:
        launcher.jobs.append(launcher.cluster.submit_job("sleep 90", "--output=/dev/null", "--gres=gpu:2"))
        return launcher.jobs[-1]

    first, second = submit_waiting(), submit_waiting()
    wait_until(lambda: launcher.job_control().others_wait(job, [job]))
    returns.look()
    wait_until_parked(started.job_control, job)
    launcher.cluster.run_command("scancel", first, second)
    look_until(lambda: isinstance(started.job_control.check_parked(job), Present))
    launcher.cluster.start_requeued_job(job.id)
    look_until(lambda: launcher.cluster.get_job_state(job.id) == "RUNNING")
    with pytest.raises(RequestRefused, match="requeued since"):
        started.job_control.find_job(request)
    again = started.job_control.find_job(replace(request, was_parked=True))
    assert isinstance(again, Job), "a stop of the run finds its job, although it was started again"
    third = submit_waiting()
    look_until(lambda: launcher.cluster.get_job_state(third) == "RUNNING")
    wait_until_parked(started.job_control, job)
    launcher.cluster.run_command("scancel", third)
    wait_until(lambda: launcher.cluster.get_job_state(third) == "CANCELLED")
    assert [entry.stop.idle_returns for entry in journal.list_parked()] == [1]
    returns.look()
    wait_until_parked(started.job_control, job)


@pytest.mark.nightly
def test_job_without_requeue_is_not_parked(launcher: SlurmLauncher) -> None:
    """A job submitted with --no-requeue is refused before anything is done to it."""
    started = launcher.start_script("", "--gres=gpu:1", "--no-requeue")
    job = started.find()
    with pytest.raises(RequestRefused, match="--requeue"):
        started.job_control.park_job(job, make_stop_request(started.labels))
    assert launcher.cluster.get_job_state(job.id) == "RUNNING"


@pytest.mark.nightly
def test_parked_job_can_be_cancelled(launcher: SlurmLauncher) -> None:
    """A held job is cancelled by a stop, and not asked for a checkpoint, which it could not save."""
    started = launcher.start()
    job = started.find()
    started.job_control.park_job(job, make_stop_request(started.labels))
    wait_until_parked(started.job_control, job)
    found_again = started.find()
    assert isinstance(started.job_control.check_job(found_again), Present)
    assert not started.job_control.request_checkpoint(found_again, make_stop_request(started.labels))
    started.cancel(found_again)
    assert wait_until_gone(started.job_control, found_again).state == "CANCELLED"
