"""Opens runs: a new one, or the one on record by its name, updated with what its trainer sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from evalstop_detectors import NOTHING_SEEN
from msgspec.structs import replace

from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.evaluation import cases
from evalstop_service.projects import policies
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.rules.labels import find_objection
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.runs import metric_roles
from evalstop_service.runs.recorded_verdict import record_verdict
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store import projects, run_health, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import FOUND_AGAIN, Run

LONGEST_NAME = 256

_NAME_TRIES = 20
"""Names that are tried when others open runs of the same name at the same time."""


@dataclass(frozen=True)
class OpenRequest:
    """What a trainer sends to open a run. None keeps the value on record, or is the project's default for a new run.

    `recognise`: assign roles to metrics by their names while the run goes on.
    """

    name: str
    metrics: dict[str, dict[str, str]] | None = None
    recognise: bool = False
    labels: dict[str, str] | None = None
    policy: str | None = None
    mode: Mode | None = None
    total_steps: int | None = None


def open_run(database: Database, project_id: UUID, request: OpenRequest, now: datetime) -> tuple[Run, bool]:
    """The run of this name, and whether it is new. Raises Conflict when its metrics differ from those on record.

    1. Insert a new run if the name is free; the unique name decides between two trainers at the same time.
    2. Otherwise lock the run on record and update it.
    """
    with database.transaction() as tx:
        project = projects.get_project(tx, project_id)
        if runs.find_run_by_name(tx, project_id, request.name) is None:
            run = _build_run(tx, project, request, now)
            if runs.add_run(tx, run):
                _start_checks(tx, project, run, now)
                return run, True
        return _reopen_by_name(tx, project, request, now), False


def create_run(tx: Transaction, project_id: UUID, request: OpenRequest, now: datetime) -> Run:
    """A new run with this name or, where that is taken, with a number appended: `name-2`."""
    project = projects.get_project(tx, project_id)
    run = _build_run(tx, project, request, now)
    for _ in range(_NAME_TRIES):
        run = replace(run, name=_find_free_name(tx, project_id, request.name))
        if runs.add_run(tx, run):
            _start_checks(tx, project, run, now)
            return run
    raise Conflict(f"a run called {run.name!r} was just opened by another; send the same again")


def relabel_run(
    database: Database,
    project_id: UUID,
    run_id: UUID,
    change_labels: Callable[[dict[str, str]], dict[str, str]],
    now: datetime,
) -> Run:
    """Change the labels of a run by a function. Raises NotFound, and Conflict if it was pruned."""
    with database.transaction() as tx:
        run = _lock_run(tx, project_id, run_id)
        refuse_pruned_run(run)
        labels = change_labels(run.labels)
        if labels == run.labels:
            return run
        run = replace(run, labels=labels, version=run.version + 1, updated_at=now)
        runs.save_run(tx, run)
        return run


def reopen_run(database: Database, project_id: UUID, run_id: UUID, now: datetime) -> Run:
    """Reopen a run that has ended, as opening it by its name does. Raises NotFound, and Conflict if it was pruned."""
    with database.transaction() as tx:
        run = _lock_run(tx, project_id, run_id)
        return _update_run(tx, projects.get_project(tx, project_id), run, OpenRequest(run.name), now)


def record_heartbeat(database: Database, project_id: UUID, run_id: UUID, now: datetime) -> Run:
    """Record that a run is alive although it reports nothing; a lost run continues. Raises NotFound.

    The run is locked only if it was lost: heartbeats do not wait for ingestion.
    """
    with database.transaction() as tx:
        run = runs.find_run(tx, project_id, run_id)
        if run is None or run.status == RunStatus.LOST:
            run = _lock_run(tx, project_id, run_id)
        if run.status == RunStatus.LOST:
            run = replace(run, **FOUND_AGAIN, version=run.version + 1, updated_at=now)
            runs.save_run(tx, run)
            cases.remove_case(tx, run)
            run_health.start_checks(tx, run.id, project_id, now, now)
        if run.status == RunStatus.RUNNING:
            run_health.record_heartbeat(tx, run.id, project_id, now)
        return run


def _lock_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run:
    run = runs.lock_run(tx, project_id, run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id} in this project")
    return run


def _build_run(tx: Transaction, project: Project, request: OpenRequest, now: datetime) -> Run:
    policy = policies.store_referred_policy(tx, project, request.policy or project.default_policy, now)
    recognized = request.metrics is None and (request.recognise or bool(project.role_patterns))
    metrics = request.metrics if request.metrics is not None else {} if recognized else DEFAULT_METRICS
    return Run(
        id=new_id(),
        project_id=project.id,
        name=request.name,
        status=RunStatus.RUNNING,
        attempt=1,
        metrics=metrics,
        labels=_merge_labels({}, request.labels or {}),
        policy_id=policy.id,
        policy_name=policy.name,
        policy_version=policy.version,
        mode=request.mode or project.default_mode,
        total_steps=request.total_steps,
        last_step=None,
        version=0,
        verdict=record_verdict(NOTHING_SEEN),
        best_checkpoint=None,
        raw_maximum=None,
        created_at=now,
        updated_at=now,
        ended_at=None,
        recognition=metric_roles.NOTHING_YET if recognized else None,
    )


def _find_free_name(tx: Transaction, project_id: UUID, name: str) -> str:
    """The name, or the name with a number that no run of the project has."""

    def number(count: int) -> str:
        tail = f"-{count}" if count > 1 else ""
        return name[: LONGEST_NAME - len(tail)] + tail

    def is_taken(count: int) -> bool:
        return runs.find_run_by_name(tx, project_id, number(count)) is not None

    # Runs of a sweep share a name by the thousand: double the number until it is free, then halve the gap.
    low, high = 0, 1
    while is_taken(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_taken(middle) else (low, middle)
    return number(high)


def _reopen_by_name(tx: Transaction, project: Project, request: OpenRequest, now: datetime) -> Run:
    named = runs.find_run_by_name(tx, project.id, request.name)
    run = runs.lock_run(tx, project.id, named.id) if named else None
    if run is None:
        raise Conflict(f"run {request.name!r} is being removed; open it again")
    return _update_run(tx, project, run, request, now)


def _update_run(tx: Transaction, project: Project, run: Run, request: OpenRequest, now: datetime) -> Run:
    """The run, which is locked, updated and running.

    1. Refuse what cannot be combined with the observations on record: pruned details, other metrics.
    2. Raise its version, so that replicas with the run in their cache reload it; a new policy or length also rebuilds
       the state of its detectors.
    3. If it had ended, remove its case and check its liveness again.
    """
    refuse_pruned_run(run)
    if request.metrics not in (None, run.metrics) and not metric_roles.is_corrected(run):
        raise Conflict(
            f"run {run.name!r} is on record with the metrics {run.metrics}, not {request.metrics}; "
            "open it without metrics, or give the new run another name"
        )
    changed = replace(
        run,
        labels=_merge_labels(run.labels, request.labels or {}),
        mode=request.mode or run.mode,
        total_steps=request.total_steps or run.total_steps,
        status=RunStatus.RUNNING,
        ended_at=None,
    )
    if request.policy is not None:
        policy = policies.store_referred_policy(tx, project, request.policy, now)
        changed = replace(changed, policy_id=policy.id, policy_name=policy.name, policy_version=policy.version)
    if changed == run:
        return run
    changed = replace(changed, version=run.version + 1, updated_at=now)
    if (changed.policy_id, changed.total_steps) != (run.policy_id, run.total_steps):
        changed = replace(changed, rewritten_version=changed.version)
    runs.save_run(tx, changed)
    if run.status != RunStatus.RUNNING:
        cases.remove_case(tx, run)
        _start_checks(tx, project, changed, now)
    return changed


def _merge_labels(labels: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    merged = labels | new
    if merged != labels and (objection := find_objection(merged)):
        raise Invalid(f"labels: {objection}")
    return merged


def _start_checks(tx: Transaction, project: Project, run: Run, now: datetime) -> None:
    run_health.start_checks(tx, run.id, project.id, now + timedelta(seconds=project.stale_seconds), now)
