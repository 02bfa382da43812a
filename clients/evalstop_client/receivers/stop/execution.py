"""Carries out one stop: writes the journal first, then executes the state machine's instructions.

1. The state machine turns the last event into a new state and one instruction.
2. The state is written to the journal before anything is done: a receiver that dies in between repeats a harmless
   step rather than forgetting one.
3. The instruction is carried out. Errors become events, so that the state machine decides about retries and failures
   are reported to the service.
4. Back to 1, until the state machine has no more instructions.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from evalstop_client.config import replace_controls
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.stop import state_machine as machine
from evalstop_client.receivers.stop.job_control import Job, JobControl, Present, StopRequest
from evalstop_client.receivers.stop.journal import Journal, JournalEntry
from evalstop_client.receivers.stop.state_machine import (
    Event,
    Happening,
    Instruction,
    JobAction,
    Phase,
    Report,
    Stop,
    StopTimeouts,
    Wait,
)
from evalstop_client.service import Accepted, Refused, Service, Unauthorized, Unavailable

logger = logging.getLogger("evalstop_client.receivers")

REPORTING_SCOPES = {"report", "operate", "admin"}
"""A key with any of them may report."""


class ReportClient:
    """Sends reports to `POST /decisions/{id}/report`; each call is one try. All stops share it."""

    def __init__(self, url: str, key: str | None) -> None:
        self._service = Service(url, key)

    def check_key(self) -> None:
        """Log what would keep reports from the service, before there is one."""
        answer = self._service.get("/key")
        if not isinstance(answer, Accepted):
            logger.warning("stops could not be reported as of now: %s", answer.reason)
        elif not REPORTING_SCOPES & set(answer.body["scopes"]):
            logger.error(
                "the key %r may not report, it has %s: `evalstop key create --name receiver --scopes report` makes one",
                answer.body["name"],
                ", ".join(answer.body["scopes"]),
            )

    def send(
        self, request: StopRequest, report: Report, expected_seconds: float | None = None
    ) -> Accepted | Unavailable | Refused:
        """Send a report once; Unavailable means to retry. `expected_seconds`: how long the job may take to save."""
        logger.info("decision %s: %s: %s", request.decision_id, report.state, report.reason)
        body = {
            "state": report.state,
            "reason": _clean(report.reason[:2000]),
            "details": _clean(dict(report.details)),
            **({} if expected_seconds is None else {"expected_seconds": expected_seconds}),
        }
        answer = self._service.post(f"/decisions/{quote(request.decision_id, safe='')}/report", body)
        if isinstance(answer, Refused):
            logger.error("the report is refused: %s", answer.reason)
        return Unavailable(answer.reason) if isinstance(answer, Unauthorized) else answer  # a person may fix the key

    def newest_checkpoint(self, request: StopRequest) -> str | None:
        """When the run's newest checkpoint was registered, by the service's clock; "" without any, None if unknown."""
        answer = self._service.get(f"/runs/{quote(request.run_id, safe='')}/checkpoints")
        if not isinstance(answer, Accepted):
            return None
        return max((item["created_at"] for item in answer.body["items"]), default="")


def _clean(value: Any) -> Any:
    """The value without the control characters that a scheduler's program may print and the service refuses."""
    match value:
        case dict():
            return {_clean(name): _clean(item) for name, item in value.items()}
        case list():
            return [_clean(item) for item in value]
        case str():
            return replace_controls(value, "\n\t")
    return value


@dataclass(frozen=True)
class ReceiverContext:
    """Shared by all stops of a receiver."""

    job_control: JobControl
    journal: Journal
    reports: ReportClient
    timeouts: StopTimeouts
    clock: Callable[[], float] = time.time


class StopExecution:
    """A stop in progress."""

    def __init__(self, entry: JournalEntry, context: ReceiverContext) -> None:
        self._request = entry.request
        self._stop = entry.stop
        self._context = context
        self._escalated = threading.Event()
        self._taken_back = threading.Event()
        self._interrupted = threading.Event()
        self._wake = threading.Event()

    def escalate(self) -> None:
        """The service escalated: kill the job instead of waiting for the cancel."""
        self._escalated.set()
        self._wake.set()

    def take_back(self) -> None:
        """A person took the stop back: drop it, or, if the job may have been cancelled already, do not kill it."""
        self._taken_back.set()
        self._wake.set()

    def interrupt(self) -> None:
        """Stop working on it; the next receiver continues from the journal."""
        self._interrupted.set()
        self._wake.set()

    def run(self) -> Stop:
        """Carry the stop out to its end, or until `interrupt`."""
        event: Event = Happening.CONTINUED
        while not self._interrupted.is_set():
            before = self._stop
            if self._taken_back.is_set() and before.taken_back_at is None:
                if machine.may_be_taken_back(before):
                    event = Happening.TAKEN_BACK
                else:  # before the event: a check that outlasts the time of the cancel must not lead to a kill
                    before, _ = self._step(before, Happening.TAKEN_BACK)
            stop, instruction = self._step(before, event)
            self._record_state(stop)
            if instruction is None:
                break
            event = self._carry_out(instruction)
        return self._stop

    def _step(self, stop: Stop, event: Event) -> tuple[Stop, Instruction | None]:
        return machine.step(stop, event, self._context.clock(), self._context.timeouts)

    def _record_state(self, stop: Stop) -> None:
        if stop == self._stop:
            return
        if stop.phase is not self._stop.phase:
            logger.info("run %s (decision %s): %s", self._request.run_name, self._request.decision_id, stop.phase)
        self._stop = stop
        while True:
            try:
                self._context.journal.record_stop(self._request, stop)
                break
            except OSError as error:  # a full disk must neither end a stop nor let it continue unjournaled
                logger.error("cannot write the journal, retrying: %s", error)
                if self._interrupted.wait(1.0):
                    return

    def _carry_out(self, instruction: Instruction) -> Event:
        match instruction:
            case Wait(seconds):
                return self._wait(seconds)
            case Report():
                return self._send_report(instruction)
        try:
            return self._control_job(instruction)
        except RequestRefused as error:
            logger.error("run %s: %s", self._request.run_name, error.detail or error)
            return machine.JobRefused(error.detail or str(error))
        except SchedulerUnavailable as error:
            return self._report_unavailable(error.detail or str(error))
        except Exception as error:  # any error must be reported to the service
            if self._stop.failures == 0:
                logger.exception("the action failed")
            return self._report_unavailable(f"{type(error).__name__}: {error}")

    def _control_job(self, action: JobAction) -> Event:
        job_control, job = self._context.job_control, self._stop.job
        if job is None:
            # Other runs of the job go on: only who can end a part of it may act.
            may_act = self._request.ends in ("job", job_control.part)
            request = replace(self._request, was_parked=self._stop.was_parked)
            found = job_control.find_job(request) if may_act else None
            return Happening.FOREIGN if found is None else self._check_found_job(found)
        match action:
            case JobAction.REQUEST_CHECKPOINT:
                newest = self._context.reports.newest_checkpoint(self._request)
                return machine.CheckpointRequested(job_control.request_checkpoint(job, self._request), newest)
            case JobAction.CANCEL:
                job_control.cancel_job(job, self._request)
                return Happening.CANCELLED
            case JobAction.PARK:
                job_control.park_job(job, self._request)
                return Happening.CANCELLED
            case JobAction.KILL:
                job_control.kill_job(job)
                return Happening.KILLED
        stop = self._stop
        was_parked = stop.parks and stop.cancelled_at is not None
        state = job_control.check_parked(job) if was_parked else job_control.check_job(job)
        awaits_checkpoint = stop.phase is Phase.SAVING and stop.known_checkpoint is not None
        return machine.JobChecked(state, self._has_newer_checkpoint() if awaits_checkpoint else None)

    def _check_found_job(self, job: Job) -> Event:
        state = self._context.job_control.check_job(job)
        if isinstance(state, Present):  # in a separate thread: the stop does not wait for the service
            threading.Thread(target=self._acknowledge_stop, args=(job,), name="acknowledge", daemon=True).start()
        return machine.JobFound(job, state)

    def _acknowledge_stop(self, job: Job) -> None:
        report = Report("acknowledged", "the job was found and is being ended", {**job.facts, "job": job.id})
        answer = self._context.reports.send(self._request, report, self._context.timeouts.checkpoint_seconds)
        if isinstance(answer, Accepted) and answer.body.get("state") == "undone":
            self.take_back()  # the request to resume the job may be late

    def _has_newer_checkpoint(self) -> bool | None:
        newest = self._context.reports.newest_checkpoint(self._request)
        return None if newest is None else newest > (self._stop.known_checkpoint or "")

    def _report_unavailable(self, reason: str) -> Event:
        if self._stop.failures == 0:
            logger.warning("run %s: %s; retrying", self._request.run_name, reason)
        return machine.SchedulerFailed(reason)

    def _wait(self, seconds: float) -> Event:
        self._wake.wait(seconds)
        self._wake.clear()
        if self._escalated.is_set() and not self._stop.escalated:
            return Happening.ESCALATED
        return Happening.CONTINUED

    def _send_report(self, report: Report) -> Event:
        answer = self._context.reports.send(self._request, report)
        if not isinstance(answer, Unavailable):
            return Happening.REPORTED
        if self._stop.report_failures == 0:
            logger.warning("the report was not accepted, retrying: %s", answer.reason)
        return machine.ReportFailed(answer.retry_after_seconds, random.random())
