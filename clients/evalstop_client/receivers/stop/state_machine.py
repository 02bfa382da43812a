"""The life cycle of a stop at the receiver, as a state machine without I/O: events in, one instruction out.

finding ──> saving ──> cancelling ──> forcing      saving: the job was asked for a checkpoint and has its time for it
   │          │            │             │         from any of the four, once the scheduler says that the job is gone:
   └──────────┴────────────┴─────────────┴──> reporting ──> done

Gone means gone and not waiting to run again: a job that starts again during its stop, often because it was asked to
save, is cancelled again. A job that can no longer be seen is reported as failed, never as confirmed.

A job to be parked is parked instead of cancelled, and never killed. A stop that takes too long is reported as failed
once and continues: when the job ends later, that is reported too. A stop that is taken back before the cancel is done.
After it, the job may be ending: it has the time of a cancel to do so, but is not killed, and a report is tried once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from evalstop_client.observations import format_time
from evalstop_client.receivers.stop.job_control import Gone, Job, Parked, Present, Unproven
from evalstop_client.service import wait_seconds


class JobAction(StrEnum):
    """An action on the job of the stop."""

    FIND = "find it, and check it"
    REQUEST_CHECKPOINT = "request a checkpoint"
    CANCEL = "cancel it"
    PARK = "park it"
    KILL = "kill it"
    CHECK = "check it and, while it has time to save, whether there is a new checkpoint"


@dataclass(frozen=True)
class Wait:
    """Wait before the next action."""

    seconds: float


@dataclass(frozen=True)
class Report:
    """Report this to the service: `state` is acknowledged, confirmed, parked or failed."""

    state: str
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


Instruction = JobAction | Wait | Report


class Happening(StrEnum):
    """An event of which nothing else is to be known."""

    CONTINUED = "the stop starts, or goes on after a pause or a restart of the receiver"
    ESCALATED = "the service escalated the stop"
    TAKEN_BACK = "a person took the stop back"
    FOREIGN = "the job belongs to another receiver"
    CANCELLED = "the scheduler accepted the cancel or the park"
    KILLED = "the scheduler accepted the kill"
    REPORTED = "the service accepted the report, or never will"


@dataclass(frozen=True)
class JobFound:
    """The job was found and checked."""

    job: Job
    seen: Present | Gone | Unproven


@dataclass(frozen=True)
class JobRefused:
    """Job control refused."""

    reason: str


@dataclass(frozen=True)
class SchedulerFailed:
    """The scheduler was unavailable."""

    reason: str


@dataclass(frozen=True)
class CheckpointRequested:
    """A checkpoint was requested or, if not `possible`, there is no way to request one."""

    possible: bool
    newest: str | None = None


@dataclass(frozen=True)
class JobChecked:
    """What the scheduler reports; `saved`: a checkpoint was registered after the request for one, None if unknown."""

    seen: Present | Parked | Gone | Unproven
    saved: bool | None = None


@dataclass(frozen=True)
class ReportFailed:
    """The service could not accept the report now; it may have sent Retry-After. `chance`: in [0, 1), spreads tries."""

    retry_after_seconds: float | None = None
    chance: float = 0.5


Event = Happening | JobFound | JobRefused | SchedulerFailed | CheckpointRequested | JobChecked | ReportFailed


class Phase(StrEnum):
    """The phases of a stop."""

    FINDING = "finding"
    SAVING = "saving"
    CANCELLING = "cancelling"
    FORCING = "forcing"
    REPORTING = "reporting"
    DONE = "done"


@dataclass(frozen=True)
class StopTimeouts:
    """How long each part of a stop may take, in seconds."""

    checkpoint_seconds: float = 120.0  # from the request for a checkpoint to the cancel; 0: no request
    cancel_seconds: float = 90.0  # from the cancel to the kill, and between kills
    give_up_seconds: float = 600.0  # from the cancel to the report that the stop failed; polling continues
    abandon_seconds: float = 7 * 86_400.0  # from the request until a job that does not end is given up
    report_seconds: float = 7 * 86_400.0  # tries to report
    poll_seconds: float = 1.0  # between two checks of the job


@dataclass(frozen=True)
class Stop:
    """The state of a stop; times are seconds since 1970, None: not yet."""

    started_at: float
    phase: Phase = Phase.FINDING
    job: Job | None = None
    found_at: float | None = None
    checkpoint_requested_at: float | None = None
    known_checkpoint: str | None = None  # the newest one at that time
    checkpoint: str | None = None
    cancelled_at: float | None = None
    killed_at: float | None = None
    escalated: bool = False  # the service escalated the stop
    failure_reported: bool = False
    report: Report | None = None
    reporting_at: float | None = None
    report_answered: bool = False  # the service has answered the report
    report_failures: int = 0  # consecutive failures to reach the service
    report_due_at: float = 0.0  # no try to report before
    failures: int = 0  # consecutive failures to reach the scheduler
    is_ours: bool = True
    parks: bool = False
    was_parked: bool = False  # the job to be stopped; a check may report it as gone, although it can be resumed
    idle_returns: int = 0  # how often the parked job ran while nobody waited, and was set aside again
    resumed_at: float | None = None
    taken_back_at: float | None = None  # when the job may already have been cancelled

    @property
    def is_parked(self) -> bool:
        has_parked = self.phase is Phase.DONE and self.report is not None and self.report.state == "parked"
        return has_parked and self.resumed_at is None and self.taken_back_at is None


def step(stop: Stop, event: Event, at: float, timeouts: StopTimeouts) -> tuple[Stop, Instruction | None]:
    """The state after an event, in seconds since 1970, and what to do next; None once the stop is done."""
    match event:
        case Happening.CONTINUED:
            return stop, _next_instruction(stop)
        case Happening.ESCALATED:
            stop = replace(stop, escalated=True)
            return stop, _next_instruction(stop)
        case Happening.TAKEN_BACK:
            if may_be_taken_back(stop):
                return _enter_phase(replace(stop, resumed_at=at), Phase.DONE)
            stop = replace(stop, taken_back_at=at)
            return stop, _next_instruction(stop)
        case Happening.FOREIGN:
            return replace(stop, phase=Phase.DONE, is_ours=False), None
        case JobRefused(reason):
            return _report(stop, Report("failed", reason, _list_details(stop)), at)
        case SchedulerFailed(reason):
            return _after_scheduler_failure(stop, reason, at, timeouts)
        case Happening.REPORTED:
            return _after_report_accepted(stop, timeouts)
        case ReportFailed():
            return _after_report_failed(stop, event, at, timeouts)
        case JobFound(job, seen):
            stop = replace(stop, job=job, found_at=at, failures=0)
            if isinstance(seen, Unproven):
                return _report_unproven(stop, seen, at)
            if isinstance(seen, Gone):
                if stop.was_parked:
                    return _enter_phase(stop, Phase.CANCELLING)
                return _report(stop, _confirm_end(stop, seen, at), at)
            return _enter_phase(stop, Phase.SAVING if timeouts.checkpoint_seconds > 0 else Phase.CANCELLING)
        case CheckpointRequested(possible, newest):
            if possible:
                stop = replace(stop, checkpoint_requested_at=at, known_checkpoint=newest, failures=0)
                return stop, Wait(timeouts.poll_seconds)
            return _enter_phase(replace(stop, checkpoint="could not be asked for", failures=0), Phase.CANCELLING)
        case Happening.CANCELLED:
            if stop.cancelled_at is not None:  # cancelled again: the limits count from the first time
                return replace(stop, failures=0), Wait(timeouts.poll_seconds)
            return replace(stop, cancelled_at=at, failures=0), Wait(timeouts.poll_seconds / 10)
        case Happening.KILLED:
            return replace(stop, killed_at=at, failures=0), Wait(timeouts.poll_seconds / 10)
        case JobChecked(seen, saved):
            return _after_check(replace(stop, failures=0), seen, saved, at, timeouts)


def may_be_taken_back(stop: Stop) -> bool:
    """Whether the job has certainly not been asked to end."""
    return stop.phase in (Phase.FINDING, Phase.SAVING)


def _next_instruction(stop: Stop) -> Instruction | None:
    """The phase's instruction, unless it is known to be done."""
    if stop.phase is Phase.DONE:
        return None
    if stop.phase is Phase.REPORTING:
        return stop.report
    if stop.job is None:
        return JobAction.FIND
    if stop.phase is Phase.SAVING and stop.checkpoint_requested_at is None:
        return JobAction.REQUEST_CHECKPOINT
    if stop.phase is Phase.SAVING or stop.taken_back_at is not None:
        return JobAction.CHECK
    if stop.phase is Phase.CANCELLING:
        return _end_job(stop) if stop.cancelled_at is None else JobAction.CHECK
    return JobAction.KILL if stop.killed_at is None else JobAction.CHECK


def _end_job(stop: Stop) -> JobAction:
    return JobAction.PARK if stop.parks else JobAction.CANCEL


def _enter_phase(stop: Stop, phase: Phase) -> tuple[Stop, Instruction | None]:
    stop = replace(stop, phase=phase)
    return stop, _next_instruction(stop)


def _report(stop: Stop, report: Report, at: float) -> tuple[Stop, Instruction]:
    return replace(stop, phase=Phase.REPORTING, report=report, reporting_at=at, failures=0), report


def _after_check(
    stop: Stop, seen: Present | Parked | Gone | Unproven, saved: bool | None, at: float, timeouts: StopTimeouts
) -> tuple[Stop, Instruction | None]:
    if isinstance(seen, Unproven):
        return _report_unproven(stop, seen, at)
    if isinstance(seen, Gone):
        return _report(stop, _confirm_end(stop, seen, at), at)
    if isinstance(seen, Parked):
        details = _list_end_details(stop, seen, "parked", at)
        return _report(stop, Report("parked", f"the job is set aside: {seen.state}", details), at)
    if stop.phase is Phase.SAVING and stop.checkpoint_requested_at is not None:
        if seen.again:  # it requeued itself, or was preempted: it would only run on
            return _enter_phase(replace(stop, checkpoint="saved" if saved else "not seen"), Phase.CANCELLING)
        if saved:
            return _enter_phase(replace(stop, checkpoint="saved"), Phase.CANCELLING)
        if at - stop.checkpoint_requested_at >= timeouts.checkpoint_seconds:
            return _enter_phase(replace(stop, checkpoint="not seen in time"), Phase.CANCELLING)
        return stop, Wait(timeouts.poll_seconds)
    if stop.taken_back_at is not None:
        return _wait_or_report_failure(stop, f"the job is still {seen.state}", at, timeouts)
    if stop.phase is Phase.CANCELLING and stop.cancelled_at is not None:
        if (stop.escalated or at - stop.cancelled_at >= timeouts.cancel_seconds) and not stop.parks:
            return _enter_phase(stop, Phase.FORCING)
        if seen.again and at - stop.cancelled_at < timeouts.give_up_seconds:
            return stop, _end_job(stop)
    elif stop.phase is Phase.FORCING and stop.killed_at is not None and at - stop.killed_at >= timeouts.cancel_seconds:
        return _enter_phase(replace(stop, killed_at=None), Phase.FORCING)
    return _wait_or_report_failure(stop, f"the job is still {seen.state}", at, timeouts)


def _after_scheduler_failure(
    stop: Stop, reason: str, at: float, timeouts: StopTimeouts
) -> tuple[Stop, Instruction | None]:
    stop = replace(stop, failures=stop.failures + 1)
    is_unasked = stop.phase is Phase.SAVING and stop.checkpoint_requested_at is None
    if is_unasked and stop.found_at is not None and at - stop.found_at >= timeouts.checkpoint_seconds:
        return _enter_phase(replace(stop, checkpoint="could not be asked for"), Phase.CANCELLING)
    return _wait_or_report_failure(stop, reason, at, timeouts)


def _wait_or_report_failure(
    stop: Stop, trouble: str, at: float, timeouts: StopTimeouts
) -> tuple[Stop, Instruction | None]:
    """Continue after a pause; report failure once when it takes too long, and give up after days.

    A job of a stop that was taken back, and that has not ended, is the sender's again: it repeats its request to resume
    the job, and everything else that it has for the run waits behind that.
    """
    is_over = stop.taken_back_at is not None and at - stop.taken_back_at >= timeouts.cancel_seconds
    if is_over or at - stop.started_at >= timeouts.abandon_seconds:
        return _enter_phase(stop, Phase.DONE)
    since = stop.started_at + timeouts.checkpoint_seconds if stop.cancelled_at is None else stop.cancelled_at
    if at - since >= timeouts.give_up_seconds and not stop.failure_reported and at >= stop.report_due_at:
        return stop, Report("failed", f"after {at - stop.started_at:.0f} s: {trouble}", _list_details(stop))
    return stop, Wait(_pause_seconds(stop, timeouts))


def _pause_seconds(stop: Stop, timeouts: StopTimeouts) -> float:
    """Seconds until the next check: longer while the scheduler is unavailable, and after a reported failure."""
    if stop.failure_reported:
        return 30 * timeouts.poll_seconds
    if stop.failures == 0:
        return timeouts.poll_seconds
    return min(wait_seconds(stop.failures, 0.5), 10 * timeouts.poll_seconds)


def _after_report_accepted(stop: Stop, timeouts: StopTimeouts) -> tuple[Stop, Instruction | None]:
    if stop.phase is Phase.REPORTING:
        return _enter_phase(replace(stop, report_answered=True), Phase.DONE)
    stop = replace(stop, failure_reported=True, report_failures=0)
    return stop, Wait(_pause_seconds(stop, timeouts))


def _after_report_failed(
    stop: Stop, event: ReportFailed, at: float, timeouts: StopTimeouts
) -> tuple[Stop, Instruction | None]:
    failures = stop.report_failures + 1
    pause_seconds = wait_seconds(failures, event.chance, event.retry_after_seconds)
    stop = replace(stop, report_failures=failures, report_due_at=at + pause_seconds)
    if stop.phase is not Phase.REPORTING or stop.reporting_at is None:
        # The job comes first: it is checked while the report waits.
        return stop, Wait(_pause_seconds(stop, timeouts))
    until = stop.reporting_at + timeouts.report_seconds
    if stop.report_due_at > until or stop.taken_back_at is not None:
        return _enter_phase(stop, Phase.DONE)
    return stop, Wait(pause_seconds)


def _report_unproven(stop: Stop, seen: Unproven, at: float) -> tuple[Stop, Instruction]:
    return _report(stop, Report("failed", seen.reason, {**_list_details(stop), **seen.details}), at)


def _confirm_end(stop: Stop, gone: Gone, at: float) -> Report:
    if stop.killed_at is not None:
        how, reason = "forced", "the job ended after it was forced to"
    elif stop.parks and stop.cancelled_at is not None:
        how, reason = "by_itself", "the job ended while it was set aside"
    elif stop.cancelled_at is not None:
        how, reason = "cancelled", "the job ended after it was cancelled"
    elif stop.checkpoint_requested_at is not None:
        how, reason = "asked", "the job ended after it was asked to save its checkpoint"
    else:
        how, reason = "by_itself", "the job had already ended by itself"
    return Report("confirmed", reason, _list_end_details(stop, gone, how, at))


def _list_end_details(stop: Stop, seen: Parked | Gone, how: str, at: float) -> dict[str, Any]:
    own = {"state": seen.state, "how": how, "gone_at": _format_time(at), "seconds": round(at - stop.started_at, 3)}
    return {**_list_details(stop), **own, **seen.details}


def _list_details(stop: Stop) -> dict[str, Any]:
    times = {"asked_at": stop.checkpoint_requested_at, "cancelled_at": stop.cancelled_at, "forced_at": stop.killed_at}
    details: dict[str, Any] = {name: _format_time(at) for name, at in times.items() if at is not None}
    if stop.job is not None:
        details = {**stop.job.facts, "job": stop.job.id, **details}
    if stop.checkpoint is not None:
        details["checkpoint"] = stop.checkpoint
    return details


def _format_time(at: float) -> str:
    return format_time(datetime.fromtimestamp(at, UTC), "milliseconds")
