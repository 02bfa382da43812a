"""The request to open a run; a project's `max_mode` and `allowed_policies` limit it.

A run that asks for more is opened anyway, so that it is watched, with the project's defaults instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from evalstop_detectors import find_total_steps

from evalstop_service.domain.decision_lifecycle import SERVICE, Mode
from evalstop_service.domain.fields import doc
from evalstop_service.domain.run import NOTHING_SAID, MetricFields, RunDescription
from evalstop_service.projects.policies import is_allowed
from evalstop_service.store.keys import Key
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run


class Resume(StrEnum):
    """Whether the trainer continues a run that may have ended: it must exist, or a new one is created instead."""

    MUST = "must"
    ALLOW = "allow"


@dataclass(frozen=True)
class OpenRequest:
    """The request to open a run. None keeps the stored value, or the project's default for a new run.

    `recognise`: assign roles to metrics by their names while the run goes on. `job`: where the trainer runs, the same
    for all processes of one job. `opening`: the id of this request, which identifies retries.
    `total_steps`: the planned length; else taken from a label or a param. `actor`: the sender, for the audit log.
    `key`: the sender's; None for the service itself. `eval_version`: the name of the eval's measurement.
    `eval_share`: checkpoints are evaluated on request, see `store.runs.Run`. `params`: of a new run, as text.
    `description`: used if none is stored.
    """

    name: str
    metrics: dict[str, MetricFields] | None = None
    recognise: bool = False
    labels: dict[str, str] | None = None
    policy: str | None = None
    mode: Mode | None = None
    total_steps: int | None = None
    eval_share: float | None = None
    job: str | None = None
    opening: UUID | None = None
    resume: Resume | None = None
    actor: str = SERVICE
    eval_version: str | None = None
    params: dict[str, str] | None = None
    description: RunDescription = NOTHING_SAID
    key: Key | None = None

    @property
    def planned_steps(self) -> int | None:
        """The planned length, from any of its sources."""
        return self.total_steps or find_total_steps(self.labels or {}) or find_total_steps(self.params or {})


class LimitedField(StrEnum):
    """A field that a project can limit."""

    MODE = "mode"
    POLICY = "policy"


@dataclass(frozen=True)
class Limit:
    """What was requested, what is used instead, and the setting of the project that limits it."""

    field: Annotated[LimitedField, doc("the requested field: mode or policy")]
    requested: Annotated[str, doc("the requested value")]
    used: Annotated[str, doc("the value used instead")]
    setting: Annotated[str, doc("the project's setting that forbids it")]


def apply_limits(project: Project, request: OpenRequest) -> OpenRequest:
    """The request without what the project does not allow."""
    allowed = request.policy is None or is_allowed(project, request.policy)
    return replace(
        request,
        mode=request.mode if _is_mode_allowed(project, request.mode) else None,
        policy=request.policy if allowed else None,
    )


def describe_limits(project: Project, request: OpenRequest, run: Run) -> list[Limit]:
    """What the run did not get of its request."""
    limits = []
    if request.mode is not None and not _is_mode_allowed(project, request.mode):
        limits.append(Limit(LimitedField.MODE, request.mode, run.mode, "max_mode"))
    if request.policy is not None and not is_allowed(project, request.policy):
        policy = f"{run.policy_name}@{run.policy_version}"
        limits.append(Limit(LimitedField.POLICY, request.policy, policy, "allowed_policies"))
    return limits


def _is_mode_allowed(project: Project, mode: Mode | None) -> bool:
    return mode is not Mode.ENFORCE or project.max_mode is Mode.ENFORCE
