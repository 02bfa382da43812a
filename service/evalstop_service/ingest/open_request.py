"""The request to open a run; a project's `max_mode` and `allowed_policies` limit it.

A run that asks for more is opened anyway, so that it is watched, with the project's defaults instead. A request that
attaches changes neither policy nor mode; another key's run keeps whatever could change which job is ended.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from evalstop_detectors import GroupRule, find_total_steps
from msgspec import json

from evalstop_service.decisions import group_rules
from evalstop_service.domain.decision_lifecycle import SERVICE, Mode
from evalstop_service.domain.run import NOTHING_SAID, MetricFields, RunDescription
from evalstop_service.errors import Conflict
from evalstop_service.projects.policies import is_allowed
from evalstop_service.runs import metric_roles
from evalstop_service.store import keys
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
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


def apply_limits(project: Project, request: OpenRequest) -> OpenRequest:
    """The request without what the project does not allow."""
    allowed = request.policy is None or is_allowed(project, request.policy)
    return replace(
        request,
        mode=request.mode if _is_mode_allowed(project, request.mode) else None,
        policy=request.policy if allowed else None,
    )


def describe_limits(project: Project, request: OpenRequest, run: Run) -> list[str]:
    """What the run did not get of its request, for people."""
    limits = []
    if request.mode is not None and not _is_mode_allowed(project, request.mode):
        limits.append(_describe_limit(f"mode {request.mode}", run.mode, "max_mode"))
    if request.policy is not None and not is_allowed(project, request.policy):
        policy = f"{run.policy_name}@{run.policy_version}"
        limits.append(_describe_limit(f"policy {request.policy}", policy, "allowed_policies"))
    return limits


def _describe_limit(requested: str, used: str, setting: str) -> str:
    return f"{requested} was requested, but the project allows {used}: a key with the scope admin can change {setting}"


def offer_rule(database: Database, author: Author, group: str, rule: GroupRule) -> list[str]:
    """Give a group a rule unless it has one; returns, for people, what the trainer did not get of its own."""
    with database.transaction() as tx:
        stands = group_rules.set_rule(tx, author, group, rule, may_change=False)
    if stands == rule:
        return []
    document = json.encode(stands).decode()
    return [
        f"the rule of the group {group} is {document}, not as requested: a key with the scope operate can change it, "
        "up to the project's max_mode"
    ]


def _is_mode_allowed(project: Project, mode: Mode | None) -> bool:
    return mode is not Mode.ENFORCE or project.max_mode is Mode.ENFORCE


def refuse_other_key(
    tx: Transaction, run: Run, changed: Collection[str], key: Key | None, now: datetime
) -> UUID | None:
    """Raise Conflict when a key that does not own the run would change these terms; returns the owning key.

    The key that opened a run owns it from then on. Keys that may end jobs anyway may change any run. If the owning key
    is no longer valid, the next key becomes the owner.
    """
    if key is None or not changed or key.id == run.opened_by:
        return run.opened_by
    if run.opened_by is None or keys.find_key(tx, run.opened_by, now) is None:
        return key.id
    if not {"operate", "admin"}.isdisjoint(key.scopes):
        return run.opened_by
    raise Conflict(
        f"run {run.name!r} was opened with another key; only this key may change its {', '.join(changed)}; "
        "omit them, or give the new run another name"
    )


def refuse_other_terms(run: Run, request: OpenRequest) -> None:
    """Raise Conflict when a request attaches to a run on other terms than those of its opening.

    A policy without a version matches any version. Labels may change when the run is resumed, possibly by another job,
    or in the job in which it runs.
    """
    policy = f"{run.policy_name}@{run.policy_version}"
    other: list[str] = []
    if request.metrics not in (None, run.metrics) and not metric_roles.is_corrected(run):
        other.append(f"metrics {run.metrics}, not {request.metrics}")
    if request.policy not in (None, run.policy_name, policy):
        other.append(f"policy {policy}, not {request.policy}")
    if request.mode not in (None, run.mode):
        other.append(f"mode {run.mode}, not {request.mode}")
    if request.resume is None and (request.job is None or request.job != run.job):
        other += [
            f"label {name} {run.labels[name]!r}, not {value!r}"
            for name, value in (request.labels or {}).items()
            if run.labels.get(name, value) != value
        ]
    if other:
        raise Conflict(
            f"run {run.name!r} keeps the terms of its opening: {'; '.join(other)}; "
            "omit them, or give the new run another name"
        )
