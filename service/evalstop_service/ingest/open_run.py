"""Opens runs: a new one, or one on record that was opened by the same name, updated with what its trainer sends.

Which one a request stands for, the first that applies:

1. the run that was opened by this very request, which was sent again;
2. with `resume`, the run that was opened by this name: the newest of the same job, else the newest;
3. a running run that was opened by this name, if it is of the same job, or if the request names none;
4. a new run, called `name-2` where the name is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

from evalstop_detectors import NOTHING_SEEN, find_total_steps
from msgspec.structs import replace

from evalstop_service.decisions import attempts
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.evaluation import cases
from evalstop_service.ingest.open_request import OpenRequest as OpenRequest
from evalstop_service.ingest.open_request import Resume as Resume
from evalstop_service.ingest.open_request import apply_limits
from evalstop_service.projects import policies
from evalstop_service.rules.eval_changes import MOST_CHANGES, EvalChange
from evalstop_service.rules.labels import find_objection, list_job_changes
from evalstop_service.rules.quotas import Quota
from evalstop_service.rules.statuses import OPEN, RunStatus
from evalstop_service.runs import metric_roles
from evalstop_service.runs.descriptions import fill_description
from evalstop_service.runs.recorded_verdict import record_verdict
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store import audit, keys, mlflow_runs, projects, quota_use, run_health, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.keys import Key
from evalstop_service.store.mlflow_runs import MlflowRun
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import FOUND_AGAIN, Run

LONGEST_NAME = 256

_NAME_TRIES = 20
"""Names that are tried when others open runs of the same name at the same time."""

_SHOWN_LABELS, _SHOWN_CHARACTERS = 20, 200
"""How much of labels that changed the audit log shows."""


def open_run(database: Database, project_id: UUID, request: OpenRequest, now: datetime) -> tuple[Run, bool]:
    """The run that the request stands for, and whether it is new.

    Raises Conflict when its terms differ from those on record, NotFound when it must be there and is not, QuotaReached
    when the project may have no more.

    1. Look for the run with the project locked, so that of two processes of a job at the same time one opens it and
       the other attaches to it.
    2. Lock a run on record in a transaction of its own, since runs are locked before their project everywhere, and
       update it, unless it has ended in between: then look again.
    """
    for _ in range(_NAME_TRIES):
        with database.transaction() as tx:
            project = projects.lock_project(tx, project_id)
            request = apply_limits(project, request)
            found = _find_run(tx, project_id, request)
            if found is None:
                if request.resume is Resume.MUST:
                    raise NotFound(f"there is no run {request.name!r} to resume in this project")
                return create_run(tx, project_id, request, now), True
        if request.opening is not None and found.opening == request.opening:  # sent again
            refuse_pruned_run(found)
            return found, False
        with database.transaction() as tx:
            run = runs.lock_run(tx, project_id, found.id)
            if run is not None and (request.resume is not None or run.status in OPEN):
                action = "run.attached" if run.status in OPEN else "run.reopened"
                run = _update_run(tx, project, run, request, now)
                _record_opening(tx, run, request, action, now)
                return run, False
    raise Conflict(f"run {request.name!r} is opened and ended by others all the time; send the same again")


def create_run(tx: Transaction, project_id: UUID, request: OpenRequest, now: datetime) -> Run:
    """A new run with this name or, where that is taken, with a number appended: `name-2`."""
    project = projects.get_project(tx, project_id)
    for quota in (Quota.OPEN_RUNS, Quota.RUNS_PER_DAY):
        quota_use.require_room(tx, project, quota, now)
    run = _build_run(tx, project, request, now)
    for _ in range(_NAME_TRIES):
        name = _find_free_name(tx, project_id, request.name)
        run = replace(run, name=name, opened_as=request.name if name != request.name else None)
        if runs.add_run(tx, run):
            if request.params:
                mlflow_runs.add_mlflow_run(tx, MlflowRun(run.id, params=request.params))
            fill_description(tx, run, request.description, now)
            _start_checks(tx, project, run, now)
            _record_opening(tx, run, request, "run.opened", now)
            return run
    raise Conflict(f"a run called {run.name!r} was just opened by another; send the same again")


def relabel_run(
    database: Database,
    project_id: UUID,
    run_id: UUID,
    change_labels: Callable[[dict[str, str]], dict[str, str]],
    actor: str,
    now: datetime,
    key: Key | None = None,
) -> Run:
    """Change the labels of a run by a function; one that names another planned length changes that.

    Raises NotFound, and Conflict if it was pruned or is another key's.
    """
    with database.transaction() as tx:
        run = _lock_run(tx, project_id, run_id)
        refuse_pruned_run(run)
        labels = change_labels(run.labels)
        if labels == run.labels:
            return run
        opened_by = _refuse_other_job(tx, run, labels, key, now)
        _record_job_change(tx, run, labels, actor, now)
        changed = replace(run, labels=labels, opened_by=opened_by, version=run.version + 1, updated_at=now)
        told = find_total_steps(labels)
        if told != find_total_steps(run.labels):
            changed = _plan_anew(tx, changed, told, actor, now)
        runs.save_run(tx, changed)
        return changed


def tell_total_steps(
    database: Database, project_id: UUID, run_id: UUID, total_steps: int, actor: str, now: datetime
) -> None:
    """Take in how long a run is planned to be. Raises NotFound, and Conflict if it was pruned."""
    with database.transaction() as tx:
        run = _lock_run(tx, project_id, run_id)
        refuse_pruned_run(run)
        if run.total_steps != total_steps:
            changed = replace(run, version=run.version + 1, updated_at=now)
            runs.save_run(tx, _plan_anew(tx, changed, total_steps, actor, now))


def reopen_run(database: Database, project_id: UUID, run_id: UUID, actor: str, now: datetime) -> Run:
    """Reopen a run that has ended, as opening it by its name does. Raises NotFound, and Conflict if it was pruned."""
    with database.transaction() as tx:
        run = _lock_run(tx, project_id, run_id)
        request = OpenRequest(run.name, actor=actor)
        reopened = _update_run(tx, projects.get_project(tx, project_id), run, request, now)
        if run.status not in OPEN:
            _record_opening(tx, reopened, request, "run.reopened", now)
        return reopened


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
        opening=request.opening,
        opened_by=None if request.key is None else request.key.id,
        eval_changes=_declare_version((), 0, request, now),
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


def _find_run(tx: Transaction, project_id: UUID, request: OpenRequest) -> Run | None:
    if request.opening is not None:
        run = runs.find_run_by_opening(tx, project_id, request.opening)
        if run is not None:
            return run
    return runs.find_opened_run(tx, project_id, request.name, request.job, ended=request.resume is not None)


def _update_run(tx: Transaction, project: Project, run: Run, request: OpenRequest, now: datetime) -> Run:
    """The run, which is locked, updated and running.

    1. Refuse what cannot be combined with the observations on record: pruned details, other metrics, other terms.
    2. A job that resumes a run is its job from now on.
    3. Raise its version, so that replicas with the run in their cache reload it; a new policy, length or
       measurement of the eval also rebuilds the state of its detectors.
    4. If it had ended, or goes on in another job, after its stop was sent, or can be no more, it begins a new attempt,
       so that it can be stopped again. Else, if it had ended, its case is removed.
    5. Its liveness is checked again.
    """
    refuse_pruned_run(run)
    if request.metrics not in (None, run.metrics) and not metric_roles.is_corrected(run):
        raise Conflict(
            f"run {run.name!r} is on record with the metrics {run.metrics}, not {request.metrics}; "
            "open it without metrics, or give the new run another name"
        )
    if run.last_step is not None:
        _refuse_other_terms(run, request)
    fill_description(tx, run, request.description, now)
    labels = _merge_labels(run.labels, request.labels or {})
    opened_by = _refuse_other_job(tx, run, labels, request.key, now)
    _record_job_change(tx, run, labels, request.actor, now)
    next_step = 0 if run.last_step is None else run.last_step + 1
    changed = replace(
        run,
        eval_changes=_declare_version(run.eval_changes, next_step, request, now),
        job=request.job or run.job,
        labels=labels,
        opened_by=opened_by,
        mode=request.mode or run.mode,
        eval_share=run.eval_share if request.eval_share is None else request.eval_share,
        status=run.status if run.status in OPEN else RunStatus.RUNNING,
        ended_at=None,
    )
    if request.policy is not None and run.last_step is None:
        policy = policies.store_referred_policy(tx, project, request.policy, now)
        changed = replace(changed, policy_id=policy.id, policy_name=policy.name, policy_version=policy.version)
    if changed == run and request.planned_steps in (None, run.total_steps):
        return run
    changed = replace(changed, version=run.version + 1, updated_at=now)
    judged_anew = ("policy_id", "eval_changes", "eval_share")
    if any(getattr(changed, name) != getattr(run, name) for name in judged_anew):
        changed = replace(changed, rewritten_version=changed.version)
    changed = _plan_anew(tx, changed, request.planned_steps, request.actor, now)
    moves = run.status not in OPEN or request.job not in (None, run.job)
    begins = moves and attempts.is_spent(tx, run)
    if begins:
        begun = attempts.begin_attempt(tx, run, now)
        changed = replace(changed, attempt=begun.attempt, turn=None)
    runs.save_run(tx, changed)
    if run.status not in OPEN:
        if not begins:
            cases.remove_case(tx, run)
        _start_checks(tx, project, changed, now)
    return changed


def _plan_anew(tx: Transaction, run: Run, total_steps: int | None, actor: str, now: datetime) -> Run:
    """The run, whose version was raised, with this planned length, if one is told; its detectors are rebuilt by it.

    A plan that takes the place of another is written down.
    """
    if total_steps in (None, run.total_steps):
        return run
    if run.total_steps is not None:
        details = {"before": run.total_steps, "after": total_steps}
        audit.record_action(tx, run.project_id, actor, "run.length_changed", f"run {run.name}", details, now)
    return replace(run, total_steps=total_steps, rewritten_version=run.version)


def _declare_version(
    changes: tuple[EvalChange, ...], step: int, request: OpenRequest, now: datetime
) -> tuple[EvalChange, ...]:
    """The changes of the eval's measurement, with one from this step on if the request says another version."""
    held = next((change.version for change in reversed(changes) if change.version is not None), None)
    if request.eval_version in (None, held) or len(changes) >= MOST_CHANGES:
        return changes
    kept = tuple(change for change in changes if change.step < step)
    return (*kept, EvalChange(step, f"version {request.eval_version}", request.actor, now, request.eval_version))


def _merge_labels(labels: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    merged = labels | new
    if merged != labels and (objection := find_objection(merged)):
        raise Invalid(f"labels: {objection}")
    return merged


def _refuse_other_job(tx: Transaction, run: Run, labels: dict[str, str], key: Key | None, now: datetime) -> UUID | None:
    """Raise Conflict when another key than the run's would have it name another job; the key whose run it is now.

    Whoever may end jobs anyway may relabel any run. A run whose key is out of use is that of the next key.
    """
    changed = list_job_changes(run.labels, labels)
    if key is None or run.last_step is None or not changed or key.id == run.opened_by:
        return run.opened_by
    if run.opened_by is None or keys.find_key(tx, run.opened_by, now) is None:
        return key.id
    if not {"operate", "admin"}.isdisjoint(key.scopes):
        return run.opened_by
    raise Conflict(
        f"run {run.name!r} has observations and was opened with another key, which alone may change what names its "
        f"job: label {', label '.join(changed)}; leave them out, or give the new run another name"
    )


def _refuse_other_terms(run: Run, request: OpenRequest) -> None:
    """Raise Conflict when the request would change what may end which job, in a run that has observations.

    A policy without a version is that of the run, whichever version it has. The labels of a run may change when it
    is resumed, which another job may do, or by the job that it runs in.
    """
    other: list[str] = []
    if request.policy not in (None, run.policy_name, f"{run.policy_name}@{run.policy_version}"):
        other.append(f"policy {run.policy_name}@{run.policy_version}, not {request.policy}")
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
            f"run {run.name!r} has observations and keeps its terms: {'; '.join(other)}; "
            "leave them out, or give the new run another name"
        )


def _record_opening(tx: Transaction, run: Run, request: OpenRequest, action: str, now: datetime) -> None:
    """Write down who opened a run and on which terms; a name may be that of several keys, an id is not."""
    details = {
        "id": str(run.id),
        "mode": run.mode,
        "policy": f"{run.policy_name}@{run.policy_version}",
        "job": run.job,
        "key": None if request.key is None else str(request.key.id),
    }
    audit.record_action(tx, run.project_id, request.actor, action, f"run {run.name}", details, now)


def _record_job_change(tx: Transaction, run: Run, labels: dict[str, str], actor: str, now: datetime) -> None:
    """Write down the labels by which a run with observations may name another job from now on."""
    if run.last_step is not None and (changed := list_job_changes(run.labels, labels)):
        details = {
            when: {name: held.get(name, "")[:_SHOWN_CHARACTERS] for name in changed[:_SHOWN_LABELS]}
            for when, held in (("before", run.labels), ("after", labels))
        }
        audit.record_action(tx, run.project_id, actor, "run.job_changed", f"run {run.name}", details, now)


def _start_checks(tx: Transaction, project: Project, run: Run, now: datetime) -> None:
    run_health.start_checks(tx, run.id, project.id, now + timedelta(seconds=project.stale_seconds), now)
