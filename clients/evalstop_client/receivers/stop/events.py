"""What can happen to a stop at the receiver; `at` is in seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass

from evalstop_client.receivers.stop.action import Gone, Job, Present


@dataclass(frozen=True)
class Begun:
    """The stop begins, or the receiver was started again in the middle of it."""

    at: float


@dataclass(frozen=True)
class Waited:
    """The pause is over."""

    at: float


@dataclass(frozen=True)
class Escalated:
    """The service has lost its patience."""

    at: float


@dataclass(frozen=True)
class Found:
    """The job was found, and looked at."""

    at: float
    job: Job
    seen: Present | Gone


@dataclass(frozen=True)
class Foreign:
    """The job is another receiver's."""

    at: float


@dataclass(frozen=True)
class Refused:
    """The action will not do it."""

    at: float
    reason: str


@dataclass(frozen=True)
class Away:
    """The scheduler could not be asked."""

    at: float
    reason: str


@dataclass(frozen=True)
class Asked:
    """The job was asked for a checkpoint, or, if not `possible`, there is no way to ask it."""

    at: float
    possible: bool
    mark: str | None = None


@dataclass(frozen=True)
class Cancelled:
    """The scheduler has taken the cancel."""

    at: float


@dataclass(frozen=True)
class Forced:
    """The scheduler has taken the order to force it."""

    at: float


@dataclass(frozen=True)
class Seen:
    """What the scheduler says; `saved`: a checkpoint came after the call for one, None when nobody can say."""

    at: float
    seen: Present | Gone
    saved: bool | None = None


@dataclass(frozen=True)
class Told:
    """The service has taken the report, or, with a `refusal`, will never take it."""

    at: float
    refusal: str | None = None


@dataclass(frozen=True)
class Untold:
    """The service could not take the report now, and may have asked for some seconds' patience."""

    at: float
    asked_seconds: float | None = None


Event = (
    Begun | Waited | Escalated | Found | Foreign | Refused | Away | Asked | Cancelled | Forced | Seen | Told | Untold
)
