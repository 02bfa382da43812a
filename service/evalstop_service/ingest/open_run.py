"""Opens runs: a new one, or an existing one opened by the same name, updated with the request.

The run for a request is the first of these that exists:

1. the run that was opened by this very request, which was retried;
2. with `resume`, the run that was opened by this name: the newest of the same job, else the newest;
3. a running run that was opened by this name, if it is of the same job, or if the request names none;
4. a new run, called `name-2` if the name is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

from evalstop_detectors import NOTHING_SEEN, find_total_steps
from msgspec.structs import replace

from evalstop_service.decisions import transitions
from evalstop_service.domain.labels import find_job_key, find_objection, list_job_changes
from evalstop_service.domain.run import MOST_CHANGES, EvalChange
from evalstop_service.domain.statuses import OPEN, RunStatus
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.evaluation import cases
from evalstop_service.ingest.open_request import OpenRequest as OpenRequest
from evalstop_service.ingest.open_request import Resume as Resume
from evalstop_service.ingest.open_request import apply_limits, refuse_other_key, refuse_other_terms
from evalstop_service.projects import policies
from evalstop_service.runs import metric_roles
from evalstop_service.runs.descriptions import fill_description
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS, record_verdict
from evalstop_service.store import audit, counts, mlflow, projects, run_details, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.keys import Key
from evalstop_service.store.mlflow import MlflowRun
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import FOUND_AGAIN, Run

LONGEST_NAME = 256

_NAME_TRIES = 20
"""Attempts to find a free name while others concurrently open runs of the same name."""

_SHOWN_LABELS, _SHOWN_CHARACTERS = 20, 200
"""How much of changed labels the audit log shows."""


def open_run(database: Database, project_id: UUID, request: OpenRequest, now: datetime) -> tuple[Run, bool]:
    """The run for the request, and whether it is new.

    Raises Conflict when its terms differ from the stored ones, NotFound when the run must exist and does not,
    QuotaReached when the project is at a quota.

    1. Look for the run with the project locked, so that of two concurrent processes of a job one opens it and the other
       attaches to it.
    2. Lock an existing run in a separate transaction, since runs are locked before their project everywhere, and update
       it, unless it has ended in between: then look again.
    """
    for _ in range(_NAME_TRIES):
        with database.transaction() as tx:
            project = projects.lock_project(tx, project_id)
            request = apply_limits(project, request)
            existing = _find_run(tx, project_id, request)
            if existing is None:
                if request.resume is Resume.MUST:
                    raise NotFound(f"there is no run {request.name!r} to resume in this project")
                return create_run(tx, project, request, now), True
        if request.opening is not None and existing.opening == request.opening:  # retried
            refuse_pruned_run(existing)
            return existing, False
        with database.transaction() as tx:
            run = runs.lock_run(tx, project_id, existing.id)
            if request.resume is not None or run.status in OPEN:
                action = "run.attached" if run.status in OPEN else "run.reopened"
                run = _update_run(tx, project, run, request, now)
                _record_opening(tx, run, request, action, now)
                return run, False
    raise Conflict(f"run {request.name!r} is being opened and ended by other requests; retry")


def create_run(tx: Transaction, project: Project, request: OpenRequest, now: datetime) -> Run:
    """Create a run with this name or, if that is taken, with a number appended: `name-2`."""
    for quota in ("open_runs", "runs_per_day"):
        counts.require_room(tx, project, quota, now)
    run = _build_run(tx, project, request, now)
    for _ in range(_NAME_TRIES):
        name = _find_free_name(tx, project.id, request.name)
        run = replace(run, name=name, opened_as=request.name if name != request.name else None)
        if runs.add_run(tx, run):
            if request.params:
                mlflow.add_mlflow_run(tx, MlflowRun(run.id, params=request.params))
            fill_description(tx, run, request.description, now)
            _start_checks(tx, project, run, now)
            _record_opening(tx, run, request, "run.opened", now)
            return run
    raise Conflict(f"a run called {run.name!r} was just opened by another request; retry")


def change_run(
    database: Database,
    project_id: UUID,
    run_id: UUID,
    change: Callable[[Run], Run],
    actor: str,
    now: datetime,
    key: Key | None,
) -> Run:
    """Change the labels or the planned length of a run with a function.

    Raises NotFound, and Conflict if the run was pruned or belongs to another key.
    """
    with database.transaction() as tx:
        run = runs.lock_run(tx, project_id, run_id)
        refuse_pruned_run(run)
        changed = _change_terms(tx, run, change(run), key, actor, now)
        if changed is not run:
            runs.save_run(tx, changed)
        return changed


def relabel_run(run: Run, labels: dict[str, str]) -> Run:
    """The run with these labels, and with the planned length that they newly state."""
    total_steps = find_total_steps(labels)
    is_new = total_steps not in (None, find_total_steps(run.labels))
    return replace(run, labels=labels, total_steps=total_steps if is_new else run.total_steps)


def reopen_run(database: Database, project_id: UUID, run_id: UUID, actor: str, now: datetime) -> Run:
    """Reopen a run that has ended, as opening it by its name does. Raises NotFound, and Conflict if it was pruned."""
    with database.transaction() as tx:
        run = runs.lock_run(tx, project_id, run_id)
        request = OpenRequest(run.name, actor=actor)
        reopened = _update_run(tx, projects.get_project(tx, project_id), run, request, now)
        if run.status not in OPEN:
            _record_opening(tx, reopened, request, "run.reopened", now)
        return reopened


def require_room_to_resume(tx: Transaction, project_id: UUID, run_id: UUID, now: datetime) -> None:
    """Raise QuotaReached when the run has ended and the project has no room for another open one."""
    run = runs.find_run(tx, project_id, run_id)
    if run is not None and run.ended_at is not None:
        counts.require_room(tx, projects.get_project(tx, project_id), "open_runs", now)


def record_heartbeat(database: Database, project_id: UUID, run_id: UUID, now: datetime) -> Run:
    """Record that a run is alive although it reports no metrics; a lost run continues. Raises NotFound.

    The run is locked only if it was lost, so heartbeats do not wait for ingestion.
    """
    with database.transaction() as tx:
        run = runs.find_run(tx, project_id, run_id)
        if run is None or run.status == RunStatus.LOST:
            run = runs.lock_run(tx, project_id, run_id)
        if run.status == RunStatus.LOST:
            run = replace(run, **FOUND_AGAIN, version=run.version + 1, updated_at=now)
            run = transitions.continue_lost_run(tx, run, now)
            runs.save_run(tx, run)
            run_details.start_checks(tx, run.id, project_id, now, now)
        if run.status == RunStatus.RUNNING:
            run_details.record_heartbeat(tx, run.id, project_id, now)
        return run


def _build_run(tx: Transaction, project: Project, request: OpenRequest, now: datetime) -> Run:
    policy = policies.find_referred_policy(tx, project.id, request.policy or project.default_policy)
    recognized = request.metrics is None and request.recognise
    metrics = request.metrics if request.metrics is not None else {} if recognized else DEFAULT_METRICS
    labels = _merge_labels({}, request.labels or {})
    return Run(
        id=new_id(),
        project_id=project.id,
        name=request.name,
        status=RunStatus.RUNNING,
        attempt=1,
        metrics=metrics,
        labels=labels,
        policy_id=policy.id,
        policy_name=policy.name,
        policy_version=policy.version,
        mode=request.mode or project.default_mode,
        total_steps=request.planned_steps,
        eval_share=request.eval_share,
        last_step=None,
        version=0,
        verdict=record_verdict(NOTHING_SEEN),
        best_checkpoint=None,
        raw_maximum=None,
        created_at=now,
        updated_at=now,
        ended_at=None,
        recognition=metric_roles.NOTHING_YET if recognized else None,
        job=request.job,
        job_key=find_job_key(labels, request.job),
        opening=request.opening,
        opened_by=None if request.key is None else request.key.id,
        eval_changes=_declare_version((), 0, request, now),
    )


def _find_free_name(tx: Transaction, project_id: UUID, name: str) -> str:
    """The name, or the name with a number appended, that no run of the project has."""

    def number(count: int) -> str:
        tail = f"-{count}" if count > 1 else ""
        return name[: LONGEST_NAME - len(tail)] + tail

    def is_taken(count: int) -> bool:
        return runs.find_run_by_name(tx, project_id, number(count)) is not None

    # A sweep may have thousands of runs of one name: double the number until it is free, then bisect.
    low, high = 0, 1
    while is_taken(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_taken(middle) else (low, middle)
    return number(high)


def _find_run(tx: Transaction, project_id: UUID, request: OpenRequest) -> Run | None:
    if request.opening is not None:
        run = runs.find_run_by_opening(tx, project_id, request.opening)
        if run is not None:
            return run
    return runs.find_opened_run(tx, project_id, request.name, request.job, ended=request.resume is not None)


def _update_run(tx: Transaction, project: Project, run: Run, request: OpenRequest, now: datetime) -> Run:
    """Update the run, which is locked, and set it running.

    1. Refuse other terms than those of its opening, and changes by another key than the run's.
    2. A job that resumes a run becomes its job.
    3. If it had ended, or continues in another job, after its stop was sent or can no longer be sent, begin a new
       attempt, so that it can be stopped again. Otherwise, if it had ended, delete its case.
    4. Check its liveness again, if it was not running.

    Raises QuotaReached when the run had ended and the project has no room for another open one.
    """
    refuse_pruned_run(run)
    if run.ended_at is not None:
        project = projects.lock_project(tx, project.id)
        counts.require_room(tx, project, "open_runs", now)
    refuse_other_terms(run, request)
    joins = fill_description(tx, run, request.description, now)
    next_step = 0 if run.last_step is None else run.last_step + 1
    changed = replace(
        run,
        eval_changes=_declare_version(run.eval_changes, next_step, request, now),
        job=request.job or run.job,
        labels=_merge_labels(run.labels, request.labels or {}),
        total_steps=request.planned_steps or run.total_steps,
        eval_share=run.eval_share if request.eval_share is None else request.eval_share,
        status=run.status if run.status in OPEN else RunStatus.RUNNING,
        ended_at=None,
    )
    changed = _change_terms(tx, run, changed, request.key, request.actor, now, joins=joins)
    if changed is run:
        return run
    moves = run.status not in OPEN or request.job not in (None, run.job)
    begins = moves and transitions.is_spent(tx, run)
    if begins:
        new_attempt = transitions.begin_attempt(tx, run, now)
        changed = replace(changed, attempt=new_attempt.attempt, exploit=None, turn=None, status=RunStatus.RUNNING)
    runs.save_run(tx, changed)
    if run.status not in OPEN and not begins:
        cases.remove_case(tx, run)
    if changed.status is not run.status:
        _start_checks(tx, project, changed, now)
    return changed


def _change_terms(
    tx: Transaction, run: Run, changed: Run, key: Key | None, actor: str, now: datetime, *, joins: bool = False
) -> Run:
    """The changed run in its next version, by which other replicas find out; the run itself if nothing changes.

    1. Raise Conflict if another key owns it and the change may have another job ended, or it ended at another time;
       `joins`: it joins a group, and the rule of a group may end its runs.
    2. Record in the audit log what changes.
    3. Have the state of its detectors rebuilt if that depends on it.
    """
    terms = [name for name in ("total_steps", "eval_share") if getattr(changed, name) != getattr(run, name)]
    if run.status in OPEN and changed.job != run.job:
        terms.append("job")
    labels = list_job_changes(run.labels, changed.labels)
    named = [*terms, *(f"label {name}" for name in labels), *(["group"] if joins else [])]
    opened_by = refuse_other_key(tx, run, named, key, now)
    if changed == run:
        return run
    if terms or labels:
        shown = labels[:_SHOWN_LABELS]
        details = {
            when: {name: getattr(version, name) for name in terms}
            | {name: version.labels.get(name, "")[:_SHOWN_CHARACTERS] for name in shown}
            for when, version in (("before", run), ("after", changed))
        }
        audit.record_action(tx, run.project_id, actor, "run.terms_changed", f"run {run.name}", details, now)
    rebuilding = ("total_steps", "eval_share", "eval_changes")
    is_rebuilt = any(getattr(changed, name) != getattr(run, name) for name in rebuilding)
    return replace(
        changed,
        job_key=find_job_key(changed.labels, changed.job),
        opened_by=opened_by,
        version=run.version + 1,
        rewritten_version=run.version + 1 if is_rebuilt else run.rewritten_version,
        updated_at=now,
    )


def _declare_version(
    changes: tuple[EvalChange, ...], step: int, request: OpenRequest, now: datetime
) -> tuple[EvalChange, ...]:
    """The changes of the eval's measurement, with one at this step if the request names another version."""
    current_version = next((change.version for change in reversed(changes) if change.version is not None), None)
    if request.eval_version in (None, current_version) or len(changes) >= MOST_CHANGES:
        return changes
    earlier = tuple(change for change in changes if change.step < step)
    return (*earlier, EvalChange(step, f"version {request.eval_version}", request.actor, now, request.eval_version))


def _merge_labels(labels: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    merged = labels | new
    if merged != labels and (objection := find_objection(merged)):
        raise Invalid(f"labels: {objection}")
    return merged


def _record_opening(tx: Transaction, run: Run, request: OpenRequest, action: str, now: datetime) -> None:
    """Record in the audit log who opened a run and on which terms; key names may repeat, key ids do not."""
    details = {
        "id": str(run.id),
        "mode": run.mode,
        "policy": f"{run.policy_name}@{run.policy_version}",
        "job": run.job,
        "key": None if request.key is None else str(request.key.id),
    }
    audit.record_action(tx, run.project_id, request.actor, action, f"run {run.name}", details, now)


def _start_checks(tx: Transaction, project: Project, run: Run, now: datetime) -> None:
    run_details.start_checks(tx, run.id, project.id, now + timedelta(seconds=project.stale_seconds), now)
