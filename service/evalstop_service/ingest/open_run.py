"""Opening a run by its name: a new one, or the one on record, brought up to date with what its trainer says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from evalstop_detectors import NOTHING_SEEN, verdict_to_document
from msgspec.structs import replace

from evalstop_service.errors import Conflict, NotFound
from evalstop_service.evaluation import cases
from evalstop_service.projects import policies
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.rules.liveness import FOUND_AGAIN
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.runs import metric_roles
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store import projects, run_health, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

"""What a project judges its runs by unless it says otherwise."""


LONGEST_NAME = 256


@dataclass(frozen=True)
class OpenRequest:
    """What a trainer says of its run; None means 'as it is', or the project's default for a new run.

    `recognise`: which metrics play which role is to be found out while the run goes on.
    """

    name: str
    metrics: dict[str, dict[str, str]] | None = None
    recognise: bool = False
    labels: dict[str, str] | None = None
    policy: str | None = None
    mode: Mode | None = None
    total_steps: int | None = None


def open_run(database: Database, project_id: UUID, request: OpenRequest, now: datetime) -> tuple[Run, bool]:
    """The run of this name, and whether it is new. Raises Conflict when its metrics differ from those on record."""
    with database.transaction() as tx:
        project = projects.get_project(tx, project_id)
        if runs.find_run_by_name(tx, project_id, request.name) is None:
            run = _new(tx, project, request, now)
            if runs.add_run(tx, run):
                _look_after(tx, project, run, now)
                return run, True
        return _reopen(tx, project, request, now), False


def create_run(database: Database, project_id: UUID, request: OpenRequest, now: datetime) -> Run:
    """A new run, called by this name or, where that is taken, by it and the end of the run's id."""
    with database.transaction() as tx:
        project = projects.get_project(tx, project_id)
        run = _new(tx, project, request, now)
        tail = f"-{run.id.hex[-12:]}"
        run = replace(run, name=request.name[:LONGEST_NAME])
        if not runs.add_run(tx, run):
            run = replace(run, name=request.name[: LONGEST_NAME - len(tail)] + tail)
            if not runs.add_run(tx, run):
                raise Conflict(f"a run called {run.name!r} is on record; send the same again")
        _look_after(tx, project, run, now)
        return run


def relabel_run(
    database: Database,
    project_id: UUID,
    run_id: UUID,
    relabelled: Callable[[dict[str, str]], dict[str, str]],
    now: datetime,
) -> Run:
    """Give a run the labels that `relabelled` makes of those on record. Raises NotFound, and Conflict if pruned."""
    with database.transaction() as tx:
        run = runs.lock_run(tx, project_id, run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id} in this project")
        refuse_pruned_run(run)
        labels = relabelled(run.labels)
        if labels == run.labels:
            return run
        run = replace(run, labels=labels, version=run.version + 1, updated_at=now)
        runs.save_run(tx, run)
        return run


def reopen_run(database: Database, project_id: UUID, run_id: UUID, now: datetime) -> Run:
    """Have a run that has ended go on, as opening it by its name does. Raises NotFound, and Conflict if pruned."""
    with database.transaction() as tx:
        run = runs.lock_run(tx, project_id, run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id} in this project")
        return _brought_up_to_date(tx, projects.get_project(tx, project_id), run, OpenRequest(run.name), now)


def record_heartbeat(database: Database, project_id: UUID, run_id: UUID, now: datetime) -> Run:
    """Take note that a run is there though it has nothing to tell; one that was lost goes on. Raises NotFound."""
    with database.transaction() as tx:
        run = runs.find_run(tx, project_id, run_id)
        if run is not None and run.status == RunStatus.LOST:
            run = runs.lock_run(tx, project_id, run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id} in this project")
        if run.status == RunStatus.LOST:
            run = replace(run, **FOUND_AGAIN, version=run.version + 1, updated_at=now)
            runs.save_run(tx, run)
            cases.remove_case(tx, run)
            run_health.start_checks(tx, run.id, project_id, now, now)
        if run.status == RunStatus.RUNNING:
            run_health.record_heartbeat(tx, run.id, project_id, now)
        return run


def _new(tx: Transaction, project: Project, request: OpenRequest, now: datetime) -> Run:
    policy = policies.store_referred_policy(tx, project, request.policy or project.default_policy, now)
    by_itself = request.metrics is None and (request.recognise or bool(project.role_patterns))
    unsaid = {} if by_itself else DEFAULT_METRICS
    return Run(
        id=new_id(),
        project_id=project.id,
        name=request.name,
        status=RunStatus.RUNNING,
        attempt=1,
        metrics=unsaid if request.metrics is None else request.metrics,
        labels=request.labels or {},
        policy_id=policy.id,
        policy_name=policy.name,
        policy_version=policy.version,
        mode=request.mode or project.default_mode,
        total_steps=request.total_steps,
        last_step=None,
        version=0,
        verdict=verdict_to_document(NOTHING_SEEN),
        best_checkpoint=None,
        raw_maximum=None,
        created_at=now,
        updated_at=now,
        ended_at=None,
        recognition=metric_roles.NOTHING_YET if by_itself else None,
    )


def _reopen(tx: Transaction, project: Project, request: OpenRequest, now: datetime) -> Run:
    known = runs.find_run_by_name(tx, project.id, request.name)
    run = runs.lock_run(tx, project.id, known.id) if known else None
    if run is None:
        raise Conflict(f"run {request.name!r} is being removed; open it again")
    return _brought_up_to_date(tx, project, run, request, now)


def _brought_up_to_date(tx: Transaction, project: Project, run: Run, request: OpenRequest, now: datetime) -> Run:
    """The run, which is locked, as its trainer says it is now, and running."""
    refuse_pruned_run(run)
    if request.metrics not in (None, run.metrics) and not metric_roles.is_corrected(run):
        raise Conflict(
            f"run {run.name!r} is on record with the metrics {run.metrics}, not {request.metrics}; "
            "open it without metrics, or give the new run another name"
        )
    changed = replace(
        run,
        labels=run.labels | (request.labels or {}),
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
        changed = replace(changed, rewritten_version=changed.version)  # the past is judged by other terms now
    runs.save_run(tx, changed)
    if run.status != RunStatus.RUNNING:
        cases.remove_case(tx, run)
        _look_after(tx, project, changed, now)
    return changed


def _look_after(tx: Transaction, project: Project, run: Run, now: datetime) -> None:
    run_health.start_checks(tx, run.id, project.id, now + timedelta(seconds=project.stale_seconds), now)
