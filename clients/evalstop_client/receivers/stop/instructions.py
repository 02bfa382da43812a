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
class JobInstruction:
    """The base of the instructions on a job that was found."""

    job: Job


class RequestCheckpoint(JobInstruction):
    """Request a checkpoint."""


class CancelJob(JobInstruction):
    """Cancel the job."""


class ParkJob(JobInstruction):
    """Park the job."""


class KillJob(JobInstruction):
    """Kill the job."""


@dataclass(frozen=True)
class CheckJob(JobInstruction):
    """Check the job; with a `known_checkpoint`, also whether a newer checkpoint exists."""

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
