"""What every action must do, whichever scheduler it speaks with: a battery that each is put through."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import pytest
from evalstop_client.errors import RequestRefused, SchedulerError
from evalstop_client.receivers import ForeignJob, Gone, Job, JobControl, Parked, Present
from evalstop_client.receivers.stop.execution import ReceiverContext, StopExecution, describe_result
from evalstop_client.receivers.stop.job_control import StopRequest, parse_stop_request
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.report import ReportClient
from evalstop_client.receivers.stop.state_machine import StopTimeouts

from tests.clients.webhooks import stop_event

POLL_SECONDS = 20.0


@dataclass(frozen=True)
class Started:
    """A job that runs, and the labels of the run in it."""

    action: JobControl
    labels: Mapping[str, str]


class Bench(Protocol):
    """Where jobs of one scheduler are started for the battery."""

    def start(self, deaf: bool = False) -> Started:
        """A job that runs on when it is asked to save, and ends on a cancel unless it is `deaf`."""
        ...

    def saves(self) -> int:
        """How often the job that was started last was asked to save."""
        ...


def request(labels: Mapping[str, str], decision_id: str = "decision-1") -> StopRequest:
    """A request to stop the run with these labels."""
    return parse_stop_request("msg_1", stop_event(dict(labels), decision_id))


def gone(action: JobControl, job: Job) -> Gone:
    """The end of a job, once its scheduler says so."""
    deadline = time.monotonic() + POLL_SECONDS
    while isinstance(seen := action.check_job(job), Present):
        assert time.monotonic() < deadline, f"it is still {seen.state}"
        time.sleep(0.05)
    return seen


def parked(action: JobControl, job: Job) -> Parked:
    """A job that was parked, once its scheduler says so."""
    deadline = time.monotonic() + POLL_SECONDS
    while not isinstance(seen := action.check_parked(job), Parked):
        assert time.monotonic() < deadline, f"it is {seen.state}"
        time.sleep(0.05)
    return seen


def found(started: Started) -> Job:
    """The job of a run."""
    job = started.action.find_job(request(started.labels))
    assert isinstance(job, Job)
    return job


class Conformance:
    """The battery; a class of tests inherits it and has a fixture `bench`."""

    def test_job_is_found_by_labels_and_by_them_alone(self, bench: Bench) -> None:
        """A run with our labels has a job that is there; a run without them is another receiver's, or is refused."""
        started = bench.start()
        assert isinstance(started.action.check_job(found(started)), Present)
        with contextlib.suppress(RequestRefused):
            assert isinstance(started.action.find_job(request({})), ForeignJob)
        started.action.cancel_job(found(started), request(started.labels))

    def test_job_runs_on_when_it_is_asked_to_save(self, bench: Bench) -> None:
        """The call for a checkpoint ends nothing."""
        started = bench.start()
        job = found(started)
        assert started.action.request_checkpoint(job, request(started.labels))
        deadline = time.monotonic() + POLL_SECONDS
        while bench.saves() == 0:
            assert time.monotonic() < deadline, "the job was not asked"
            time.sleep(0.02)
        assert isinstance(started.action.check_job(job), Present)
        started.action.cancel_job(job, request(started.labels))

    def test_cancelled_job_goes_and_stays_gone(self, bench: Bench) -> None:
        """After a cancel the scheduler says that the job is gone, with details that a report can carry."""
        started = bench.start()
        job = found(started)
        started.action.cancel_job(job, request(started.labels))
        end = gone(started.action, job)
        assert json.loads(json.dumps(end.details)) == end.details
        assert isinstance(started.action.check_job(job), Gone)

    def test_cancelling_and_forcing_what_is_gone_is_harmless(self, bench: Bench) -> None:
        """A receiver that was started again may repeat what it did."""
        started = bench.start()
        job = found(started)
        for _ in range(2):
            started.action.cancel_job(job, request(started.labels))
        gone(started.action, job)
        try:
            started.action.cancel_job(job, request(started.labels))
            started.action.kill_job(job)
            started.action.request_checkpoint(job, request(started.labels))
        except SchedulerError as error:
            pytest.fail(f"it is not harmless: {error}")
        assert isinstance(started.action.check_job(job), Gone)

    def test_deaf_job_can_be_forced(self, bench: Bench) -> None:
        """What ignores the cancel ends when it is forced."""
        started = bench.start(deaf=True)
        job = found(started)
        started.action.cancel_job(job, request(started.labels))
        started.action.kill_job(job)
        gone(started.action, job)

    def test_job_is_known_again_after_a_restart(self, bench: Bench) -> None:
        """What find() gave is enough for everything else, when it comes back from the disk."""
        started = bench.start()
        first = found(started)
        job = Job(**json.loads(json.dumps({"id": first.id, "facts": dict(first.facts)})))
        assert isinstance(started.action.check_job(job), Present)
        started.action.cancel_job(job, request(started.labels))
        gone(started.action, job)

    def test_whole_stop_is_confirmed(self, bench: Bench) -> None:
        """Asked to save, cancelled, seen to be gone: from the request to the report."""
        started = bench.start()
        memory = Journal(None)
        bounds = StopTimeouts(checkpoint_seconds=0.3, cancel_seconds=20, give_up_seconds=40, poll_seconds=0.1)
        around = ReceiverContext(started.action, memory, lambda: ReportClient(None, None, "test"), bounds, Metrics())
        begun = memory.begin(request(started.labels), time.time())
        assert begun is not None
        stop = StopExecution(begun, around, lambda _: None).run()
        assert describe_result(stop) == "confirmed"
        assert stop.report is not None
        assert (stop.report.details["how"], bench.saves()) == ("cancelled", 1)
        assert stop.report.details["asked_at"] < stop.report.details["cancelled_at"] < stop.report.details["gone_at"]
