"""What a trainer asks for when it opens a run; a project's `max_mode` and `allowed_policies` bound it.

A run that asks for more is opened all the same, so that it is watched: with what the project gives without being asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from uuid import UUID

from evalstop_detectors import find_total_steps

from evalstop_service.projects.policies import is_allowed
from evalstop_service.rules.decision_lifecycle import SERVICE, Mode
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.rules.run_descriptions import NOTHING_SAID, RunDescription
from evalstop_service.store.keys import Key
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run


class Resume(StrEnum):
    """Whether the trainer continues a run that may have ended: it has to be there, or a new one will do."""

    MUST = "must"
    ALLOW = "allow"


@dataclass(frozen=True)
class OpenRequest:
    """What a trainer sends to open a run. None keeps the value on record, or is the project's default for a new run.

    `recognise`: assign roles to metrics by their names while the run goes on. `job`: where the trainer runs, the same
    for all processes of one job. `opening`: an id of this request, by which it is known when it is sent again.
    `total_steps`: the planned length, else a label or a param says it. `actor`: who sends it, for the audit log.
    `key`: that of who sends it; None for the service itself. `eval_version`: what the eval's measurement is called.
    `eval_share`: somebody evaluates checkpoints on request, see `store.runs.Run`. `params`: what a new run is trained
    with, as text. `description`: what is said of it, where nothing is on record.
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
        """The planned length that it tells, in one way or the other."""
        return self.total_steps or find_total_steps(self.labels or {}) or find_total_steps(self.params or {})


class LimitedField(StrEnum):
    """What a trainer may not choose freely."""

    MODE = "mode"
    POLICY = "policy"


@dataclass(frozen=True)
class Limit:
    """What was asked for and not given, what was given, and the setting of the project that says so."""

    field: LimitedField
    asked: str
    given: str
    setting: str


def apply_limits(project: Project, request: OpenRequest) -> OpenRequest:
    """The request without what the project does not allow."""
    allowed = request.policy is None or is_allowed(project, request.policy)
    return replace(
        request,
        mode=request.mode if _is_mode_allowed(project, request.mode) else None,
        policy=request.policy if allowed else None,
    )


def describe_limits(project: Project, request: OpenRequest, run: Run) -> list[Limit]:
    """What the run that was opened by a request was not given of it."""
    limits = []
    if request.mode is not None and not _is_mode_allowed(project, request.mode):
        limits.append(Limit(LimitedField.MODE, request.mode, run.mode, "max_mode"))
    if request.policy is not None and not is_allowed(project, request.policy):
        given = f"{run.policy_name}@{run.policy_version}"
        limits.append(Limit(LimitedField.POLICY, request.policy, given, "allowed_policies"))
    return limits


def _is_mode_allowed(project: Project, mode: Mode | None) -> bool:
    return mode is not Mode.ENFORCE or project.max_mode is Mode.ENFORCE
