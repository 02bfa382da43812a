"""What the state machine of a stop asks the receiver to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evalstop_client.receivers.stop.job_control import Job


@dataclass(frozen=True)
class Report:
    """A report to the service: `state` is acknowledged, confirmed, parked or failed."""

    state: str
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FindJob:
    """Find the job and check it."""


@dataclass(frozen=True)
class RequestCheckpoint:
    """Request a checkpoint."""

    job: Job


@dataclass(frozen=True)
class CancelJob:
    """Have it cancelled."""

    job: Job


@dataclass(frozen=True)
class ParkJob:
    """Have it set aside."""

    job: Job


@dataclass(frozen=True)
class KillJob:
    """Have it forced."""

    job: Job


@dataclass(frozen=True)
class CheckJob:
    """CheckJob at the job; with a `mark`, also whether a newer checkpoint than that exists."""

    job: Job
    mark: str | None = None


@dataclass(frozen=True)
class Wait:
    """Do nothing for so long."""

    seconds: float


@dataclass(frozen=True)
class SendReport:
    """Report."""

    report: Report


Instruction = FindJob | RequestCheckpoint | CancelJob | ParkJob | KillJob | CheckJob | Wait | SendReport
