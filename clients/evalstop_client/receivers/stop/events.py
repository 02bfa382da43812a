"""What can happen to a stop at the receiver; `at` is in seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass

from evalstop_client.receivers.stop.job_control import Gone, Job, Present


@dataclass(frozen=True)
class Started:
    """The stop begins, or the receiver was started again in the middle of it."""

    at: float


@dataclass(frozen=True)
class WaitEnded:
    """The pause is over."""

    at: float


@dataclass(frozen=True)
class StopEscalated:
    """The service has lost its patience."""

    at: float


@dataclass(frozen=True)
class JobFound:
    """The job was found, and looked at."""

    at: float
    job: Job
    seen: Present | Gone


@dataclass(frozen=True)
class JobForeign:
    """The job is another receiver's."""

    at: float


@dataclass(frozen=True)
class JobRefused:
    """The action will not do it."""

    at: float
    reason: str


@dataclass(frozen=True)
class SchedulerFailed:
    """The scheduler could not be asked."""

    at: float
    reason: str


@dataclass(frozen=True)
class CheckpointRequested:
    """The job was asked for a checkpoint, or, if not `possible`, there is no way to ask it."""

    at: float
    possible: bool
    mark: str | None = None


@dataclass(frozen=True)
class JobCancelled:
    """The scheduler has taken the cancel."""

    at: float


@dataclass(frozen=True)
class JobKilled:
    """The scheduler has taken the order to force it."""

    at: float


@dataclass(frozen=True)
class JobChecked:
    """What the scheduler says; `saved`: a checkpoint came after the call for one, None when nobody can say."""

    at: float
    seen: Present | Gone
    saved: bool | None = None


@dataclass(frozen=True)
class ReportAccepted:
    """The service has taken the report, or, with a `refusal`, will never take it."""

    at: float
    refusal: str | None = None


@dataclass(frozen=True)
class ReportFailed:
    """The service could not take the report now, and may have asked for some seconds' patience."""

    at: float
    retry_after_seconds: float | None = None


Event = (
    Started
    | WaitEnded
    | StopEscalated
    | JobFound
    | JobForeign
    | JobRefused
    | SchedulerFailed
    | CheckpointRequested
    | JobCancelled
    | JobKilled
    | JobChecked
    | ReportAccepted
    | ReportFailed
)
