"""The conformance suite: what every JobControl must do, whichever scheduler it uses."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.stop.execution import (
    ReceiverContext,
    ReportClient,
    StopExecution,
)
from evalstop_client.receivers.stop.job_control import (
    Gone,
    Job,
    JobControl,
    Parked,
    Present,
    StopRequest,
    Unproven,
    parse_stop_request,
)
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.state_machine import Phase, Report, StopTimeouts
from evalstop_client.service import Accepted

from tests.clients.programs import wait_until
from tests.clients.webhooks import make_stop_event


@dataclass(frozen=True)
class StartedJob:
    """A running job: the job control of its scheduler, and the labels of its run."""

    job_control: JobControl
    labels: Mapping[str, str]

    def find(self) -> Job:
        return find_job(self.job_control, self.labels)

    def cancel(self, job: Job) -> None:
        self.job_control.cancel_job(job, make_stop_request(self.labels))


class Launcher(Protocol):
    """Starts jobs of one scheduler for the conformance suite."""

    def start(self, ignores_sigterm: bool = False) -> StartedJob:
        """Start a job that continues when it is asked to save, and ends on SIGTERM unless it ignores that."""
        ...


class SavingLauncher(Launcher, Protocol):
    """Starts jobs that can be asked to save."""

    def count_saves(self) -> int:
        """How often the job started last has saved."""
        ...


def make_stop_request(labels: Mapping[str, str], decision_id: str = "decision-1") -> StopRequest:
    """A request to stop the run with these labels."""
    return parse_stop_request("msg_1", make_stop_event(dict(labels), decision_id))


def find_job(job_control: JobControl, labels: Mapping[str, str]) -> Job:
    """The job of the run with these labels."""
    job = job_control.find_job(make_stop_request(labels))
    assert isinstance(job, Job)
    return job


def wait_until_gone(job_control: JobControl, job: Job) -> Gone:
    """The end of a job, once its scheduler reports it."""

    def check() -> Gone | None:
        state = job_control.check_job(job)
        assert not isinstance(state, Unproven)
        return None if isinstance(state, Present) else state

    end = wait_until(check)
    assert end is not None
    return end


def wait_until_parked(job_control: JobControl, job: Job) -> Parked:
    """The state of a parked job, once its scheduler reports it."""

    def check() -> Parked | None:
        state = job_control.check_parked(job)
        return state if isinstance(state, Parked) else None

    parked = wait_until(check)
    assert parked is not None
    return parked


class DroppedReports(ReportClient):
    """Reports that go nowhere."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", None)

    def send(self, request: StopRequest, report: Report, expected_seconds: float | None = None) -> Accepted:
        return Accepted({})

    def newest_checkpoint(self, request: StopRequest) -> None:
        pass


def carry_out_stop(launcher: Launcher) -> Mapping[str, Any]:
    """The details of the report on a stop that was carried out to its end."""
    started = launcher.start()
    journal = Journal(None)
    bounds = StopTimeouts(checkpoint_seconds=0.3, cancel_seconds=20, give_up_seconds=40, poll_seconds=0.1)
    reports = DroppedReports()
    context = ReceiverContext(started.job_control, journal, reports, bounds)
    entry = journal.begin_stop(make_stop_request(started.labels), time.time())
    assert entry is not None
    stop = StopExecution(entry, context).run()
    assert stop.report is not None
    assert (stop.phase, stop.report.state) == (Phase.DONE, "confirmed")
    return stop.report.details


class Conformance:
    """Inherited by a class of tests for each scheduler, which has a fixture `launcher`."""

    def test_job_is_found_by_its_labels(self, launcher: Launcher) -> None:
        """A run with the job's labels finds it; a run without labels is another receiver's, or is refused."""
        started = launcher.start()
        assert isinstance(started.job_control.check_job(started.find()), Present)
        with contextlib.suppress(RequestRefused):
            assert started.job_control.find_job(make_stop_request({})) is None
        started.cancel(started.find())

    def test_cancelled_job_is_gone(self, launcher: Launcher) -> None:
        """After a cancel the scheduler reports the job as gone, with details that serialize to JSON."""
        started = launcher.start()
        job = started.find()
        started.cancel(job)
        end = wait_until_gone(started.job_control, job)
        assert json.loads(json.dumps(end.details)) == end.details
        assert isinstance(started.job_control.check_job(job), Gone)

    def test_cancel_and_kill_of_a_gone_job_do_nothing(self, launcher: Launcher) -> None:
        """Every call may be repeated after the job has ended, as a restarted receiver does."""
        started = launcher.start()
        job = started.find()
        for _ in range(2):
            started.cancel(job)
        wait_until_gone(started.job_control, job)
        try:
            started.cancel(job)
            started.job_control.kill_job(job)
            started.job_control.request_checkpoint(job, make_stop_request(started.labels))
        except (RequestRefused, SchedulerUnavailable) as error:
            pytest.fail(f"a repeated call failed: {error}")
        assert isinstance(started.job_control.check_job(job), Gone)

    def test_job_that_ignores_sigterm_is_killed(self, launcher: Launcher) -> None:
        """A job that survives the cancel ends when it is killed."""
        started = launcher.start(ignores_sigterm=True)
        job = started.find()
        started.cancel(job)
        started.job_control.kill_job(job)
        wait_until_gone(started.job_control, job)

    def test_job_is_usable_after_a_restart(self, launcher: Launcher) -> None:
        """A job that was written to disk and read again can be checked and cancelled."""
        started = launcher.start()
        found = started.find()
        job = Job(**json.loads(json.dumps({"id": found.id, "facts": dict(found.facts)})))
        assert isinstance(started.job_control.check_job(job), Present)
        started.cancel(job)
        wait_until_gone(started.job_control, job)

    def test_whole_stop_is_confirmed(self, launcher: Launcher) -> None:
        """From the request to the report: the job is cancelled, and reported as gone."""
        details = carry_out_stop(launcher)
        assert details["how"] == "cancelled"
        assert details["cancelled_at"] < details["gone_at"]


class SavingConformance(Conformance):
    """The same for schedulers that can ask a job to save."""

    def test_job_continues_after_a_checkpoint_request(self, launcher: SavingLauncher) -> None:
        """A job that is asked for a checkpoint saves one and continues to run."""
        started = launcher.start()
        job = started.find()
        assert started.job_control.request_checkpoint(job, make_stop_request(started.labels))
        wait_until(lambda: launcher.count_saves() > 0)
        assert isinstance(started.job_control.check_job(job), Present)
        started.cancel(job)

    def test_job_is_asked_to_save_before_the_cancel(self, launcher: SavingLauncher) -> None:
        """A job that is stopped saves once, before it is cancelled."""
        details = carry_out_stop(launcher)
        assert launcher.count_saves() == 1
        assert details["asked_at"] < details["cancelled_at"]
