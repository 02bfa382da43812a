"""Events in the life of a stop at the receiver; `at` is in seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass

from evalstop_client.receivers.stop.job_control import Gone, Job, Present


@dataclass(frozen=True)
class Started:
    """The stop starts, or the receiver restarted in the middle of it."""

    at: float


@dataclass(frozen=True)
class WaitEnded:
    """The pause is over."""

    at: float


@dataclass(frozen=True)
class StopEscalated:
    """The service escalated the stop."""

    at: float


@dataclass(frozen=True)
class JobFound:
    """The job was found and checked."""

    at: float
    job: Job
    seen: Present | Gone


@dataclass(frozen=True)
class JobForeign:
    """The job belongs to another receiver."""

    at: float


@dataclass(frozen=True)
class JobRefused:
    """Job control refused."""

    at: float
    reason: str


@dataclass(frozen=True)
class SchedulerFailed:
    """The scheduler was unavailable."""

    at: float
    reason: str


@dataclass(frozen=True)
class CheckpointRequested:
    """A checkpoint was requested or, if not `possible`, there is no way to request one."""

    at: float
    possible: bool
    mark: str | None = None


@dataclass(frozen=True)
class JobCancelled:
    """The scheduler accepted the cancel."""

    at: float


@dataclass(frozen=True)
class JobKilled:
    """The scheduler accepted the kill."""

    at: float


@dataclass(frozen=True)
class JobChecked:
    """What the scheduler reports; `saved`: a checkpoint was registered after the request for one, None if unknown."""

    at: float
    seen: Present | Gone
    saved: bool | None = None


@dataclass(frozen=True)
class ReportAccepted:
    """The service accepted the report or, with a `refusal`, never will."""

    at: float
    refusal: str | None = None


@dataclass(frozen=True)
class ReportFailed:
    """The service could not take the report now; it may have sent Retry-After."""

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
