"""The life of a stop at the receiver: the events in it, and the instructions of its state machine.

Times are in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from evalstop_client.receivers.stop.job_control import Gone, Job, Parked, Present, Unproven


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


@dataclass(frozen=True)
class TimedEvent:
    """The base of all events."""

    at: float


class Started(TimedEvent):
    """The stop starts, or the receiver restarted in the middle of it."""


class WaitEnded(TimedEvent):
    """The pause is over."""


class StopEscalated(TimedEvent):
    """The service escalated the stop."""


class StopTakenBack(TimedEvent):
    """A person took the stop back."""


@dataclass(frozen=True)
class JobFound(TimedEvent):
    """The job was found and checked."""

    job: Job
    seen: Present | Gone | Unproven


class JobForeign(TimedEvent):
    """The job belongs to another receiver."""


@dataclass(frozen=True)
class JobRefused(TimedEvent):
    """Job control refused."""

    reason: str


@dataclass(frozen=True)
class SchedulerFailed(TimedEvent):
    """The scheduler was unavailable."""

    reason: str


@dataclass(frozen=True)
class CheckpointRequested(TimedEvent):
    """A checkpoint was requested or, if not `possible`, there is no way to request one."""

    possible: bool
    newest: str | None = None


class JobCancelled(TimedEvent):
    """The scheduler accepted the cancel or the park."""


class JobKilled(TimedEvent):
    """The scheduler accepted the kill."""


@dataclass(frozen=True)
class JobChecked(TimedEvent):
    """What the scheduler reports; `saved`: a checkpoint was registered after the request for one, None if unknown."""

    seen: Present | Parked | Gone | Unproven
    saved: bool | None = None


@dataclass(frozen=True)
class ReportAccepted(TimedEvent):
    """The service accepted the report or, with a `refusal`, never will."""

    refusal: str | None = None


@dataclass(frozen=True)
class ReportFailed(TimedEvent):
    """The service could not accept the report now; it may have sent Retry-After. `chance`: in [0, 1), spreads tries."""

    retry_after_seconds: float | None = None
    chance: float = 0.5


Event = (
    Started
    | WaitEnded
    | StopEscalated
    | StopTakenBack
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
