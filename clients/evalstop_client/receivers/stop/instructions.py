"""The instructions of the state machine of a stop."""

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
    """Cancel the job."""

    job: Job


@dataclass(frozen=True)
class ParkJob:
    """Park the job."""

    job: Job


@dataclass(frozen=True)
class KillJob:
    """Kill the job."""

    job: Job


@dataclass(frozen=True)
class CheckJob:
    """Check the job; with a `known_checkpoint`, also whether a newer checkpoint exists."""

    job: Job
    known_checkpoint: str | None = None


@dataclass(frozen=True)
class Wait:
    """Wait."""

    seconds: float


@dataclass(frozen=True)
class SendReport:
    """Report."""

    report: Report


Instruction = FindJob | RequestCheckpoint | CancelJob | ParkJob | KillJob | CheckJob | Wait | SendReport
