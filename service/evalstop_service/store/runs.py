"""Runs: one row each; and the runs of one job, which all end with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import sqlalchemy as sa
from msgspec import structs

from evalstop_service.domain.decision_lifecycle import STOPPING, Action, DecisionState, Exploit, GuardKind
from evalstop_service.domain.labels import JobPart, find_job_part, read_gpus
from evalstop_service.domain.run import BestCheckpoint, Call, ChangePoint, FirstCall, RawMaximum, Verdict
from evalstop_service.domain.statuses import OPEN, RunStatus
from evalstop_service.errors import require
from evalstop_service.store.database import Transaction, find_all, find_one, insert_if_new, save_row
from evalstop_service.store.tables import LIVE, attempts, checkpoints, decisions, running_runs, runs
from evalstop_service.store.tables.decisions import ENDS_ATTEMPT
from evalstop_service.store.tables.runs import Run as Run
from evalstop_service.store.tables.runs import RunningRun


class RunChanges(TypedDict, total=False):
    """The fields that may change when observations or a checkpoint arrive, or when the run resumes."""

    status: RunStatus
    attempt: int
    last_step: int | None
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None
    raw_maximum: RawMaximum | None
    turn: ChangePoint | None
    rewritten_version: int
    ended_at: datetime | None
    detector_failure: str | None
    calls: dict[str, FirstCall]
    exploit: Exploit | None


FOUND_AGAIN: RunChanges = {"status": RunStatus.RUNNING, "ended_at": None, "turn": None}
"""The changes when a lost run reports again."""


@dataclass(frozen=True)
class Attempt:
    """How an attempt began: resumed from a step of an earlier attempt, or (None) from scratch."""

    resumed_from_step: int | None
    started_at: datetime


def add_run(tx: Transaction, run: Run) -> bool:
    """Store a new run and its first attempt; False if the project has a run of that name."""
    if not insert_if_new(tx, runs, structs.asdict(run), ["project_id", "name"]):
        return False
    tx.execute(attempts.insert(), {"run_id": run.id, "attempt": run.attempt, "started_at": run.created_at})
    _save_copy(tx, run)
    return True


def save_run(tx: Transaction, run: Run) -> None:
    """Store a run that was locked in this transaction."""
    tx.execute(runs.update().where(runs.c.id == run.id).values(structs.asdict(run)))
    _save_copy(tx, run)


def add_attempt(tx: Transaction, run_id: UUID, attempt: int, resumed_from_step: int, now: datetime) -> None:
    """Record that an attempt began at a step of an earlier one."""
    tx.execute(
        attempts.insert().values(run_id=run_id, attempt=attempt, resumed_from_step=resumed_from_step, started_at=now)
    )


def get_attempt(tx: Transaction, run_id: UUID, attempt: int) -> Attempt:
    """How an existing attempt of a run began."""
    query = sa.select(attempts.c.resumed_from_step, attempts.c.started_at)
    return Attempt(*tx.execute(query.where(attempts.c.run_id == run_id, attempts.c.attempt == attempt)).one())


def get_resumed_step(tx: Transaction, run: Run) -> int | None:
    """The step at which the current attempt was resumed; None for the first."""
    return get_attempt(tx, run.id, run.attempt).resumed_from_step


def load_attempt_starts(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, datetime]:
    """When the current attempt of each of these runs began."""
    query = sa.select(runs.c.id, attempts.c.started_at).join(
        attempts, (attempts.c.run_id == runs.c.id) & (attempts.c.attempt == runs.c.attempt)
    )
    return {row.id: row.started_at for row in tx.execute(query.where(runs.c.id.in_(run_ids)))}


def find_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run | None:
    """The project's run with this id."""
    return find_one(tx, Run, _SELECT.where(runs.c.project_id == project_id, runs.c.id == run_id))


def load_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run:
    """The project's run with this id; raises NotFound."""
    return require(find_run(tx, project_id, run_id), f"run {run_id} in this project")


def find_run_by_name(tx: Transaction, project_id: UUID, name: str) -> Run | None:
    """The project's run with this name."""
    return find_one(tx, Run, _SELECT.where(runs.c.project_id == project_id, runs.c.name == name))


def find_run_by_opening(tx: Transaction, project_id: UUID, opening: UUID) -> Run | None:
    """The project's run that was opened by the request with this id."""
    return find_one(tx, Run, _SELECT.where(runs.c.project_id == project_id, runs.c.opening == opening))


def find_opened_run(tx: Transaction, project_id: UUID, name: str, job: str | None, *, ended: bool) -> Run | None:
    """The run opened under this name, whatever name it got: the newest of this job, else the newest of any.

    Unless `ended`, only runs that have not ended count, and runs of other jobs only if `job` is None.
    """
    query = _SELECT.where(runs.c.project_id == project_id, (runs.c.name == name) | (runs.c.opened_as == name))
    if not ended:
        query = query.where(runs.c.status.in_(OPEN))
        if job is not None:
            query = query.where(runs.c.job == job)
    return find_one(tx, Run, query.order_by(runs.c.job.is_not_distinct_from(job).desc(), runs.c.id.desc()).limit(1))


def lock_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run:
    """The project's run with this id, locked until the transaction ends; raises NotFound."""
    query = _SELECT.where(runs.c.project_id == project_id, runs.c.id == run_id).with_for_update()
    return require(find_one(tx, Run, query), f"run {run_id} in this project")


def lock_runs(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, int]:
    """The versions of those of these runs that exist, locked until the transaction ends, in ascending order of id."""
    # A fixed lock order prevents deadlocks between transactions that lock many runs.
    query = sa.select(runs.c.id, runs.c.version).where(runs.c.id.in_(run_ids)).order_by(runs.c.id)
    return {row.id: row.version for row in tx.execute(query.with_for_update())}


def load_runs(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, Run]:
    """Those of these runs that exist."""
    return {run.id: run for run in find_all(tx, Run, _SELECT.where(runs.c.id.in_(run_ids)))}


class RunWithCounts(NamedTuple):
    """A run, whether its current attempt has a decision, and the number of its live checkpoints."""

    run: Run
    has_decision: bool
    checkpoints: int


def load_runs_with_counts(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, RunWithCounts]:
    """Those of these runs that exist, with the counts that show whether more has to be read."""
    rows = tx.execute(_SELECT_WITH_COUNTS.where(runs.c.id.in_(run_ids))).mappings()
    return {row["id"]: _with_counts(**row) for row in rows}


def _with_counts(*, has_decision: bool, checkpoint_count: int, **columns: Any) -> RunWithCounts:
    return RunWithCounts(Run(**columns), has_decision, checkpoint_count)


def save_changes(tx: Transaction, before: Run, run: Run) -> None:
    """Store the columns of a locked run that differ from `before`: at least its version."""
    names = [column.name for column in runs.c if getattr(run, column.name) != getattr(before, column.name)]
    tx.execute(runs.update().where(runs.c.id == run.id).values({name: getattr(run, name) for name in names}))
    if _copy_of(run) != _copy_of(before):
        _save_copy(tx, run)


def raise_version(tx: Transaction, run_id: UUID, **values: Any) -> None:
    """Change columns of a run, which is locked; run caches then reload it with its decision."""
    tx.execute(runs.update().where(runs.c.id == run_id).values(version=runs.c.version + 1, **values))


def find_newest_run(tx: Transaction, project_id: UUID, policy_name: str) -> Run | None:
    """The newest run under a policy, in any version."""
    query = _SELECT.where(runs.c.project_id == project_id, runs.c.policy_name == policy_name)
    return find_one(tx, Run, query.order_by(runs.c.id.desc()).limit(1))


def count_running_runs(tx: Transaction, project_id: UUID, most: int) -> int:
    """How many runs of a project have not ended, counted up to `most`."""
    query = sa.select(runs.c.id).where(runs.c.project_id == project_id, runs.c.status == RunStatus.RUNNING).limit(most)
    return tx.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()


_SELECT = sa.select(runs)

_SELECT_WITH_COUNTS = _SELECT.add_columns(
    sa.exists()
    .where(decisions.c.run_id == runs.c.id, decisions.c.attempt == runs.c.attempt, sa.text(ENDS_ATTEMPT))
    .label("has_decision"),
    sa.select(sa.func.count())
    .where(checkpoints.c.run_id == runs.c.id, checkpoints.c.superseded_by == LIVE)
    .scalar_subquery()
    .label("checkpoint_count"),
)


def _save_copy(tx: Transaction, run: Run) -> None:
    if (copy := _copy_of(run)) is not None:
        save_row(tx, running_runs, copy._asdict())
    else:
        tx.execute(running_runs.delete().where(running_runs.c.run_id == run.id))


def _copy_of(run: Run) -> RunningRun | None:
    if run.status is not RunStatus.RUNNING:
        return None
    may_have_turned = run.verdict.verdict is not Call.CONTINUE
    return RunningRun(run.id, run.project_id, may_have_turned, read_gpus(run.labels), run.job_key)


TO_BE_STOPPED = STOPPING | {DecisionState.PENDING}


@dataclass(frozen=True)
class JobRun:
    """A live run in the job of another run. `waits`: its own stop is on hold for nothing but the runs of the job."""

    id: UUID
    name: str
    part: JobPart | None
    waits: bool
    created_at: datetime


def list_spared_runs(tx: Transaction, run: Run, action: Action) -> list[JobRun]:
    """The other live runs in the job of a run that have no such action of their own, oldest first."""
    return [
        JobRun(
            row.id,
            row.name,
            find_job_part(row.labels),
            row.action == action and row.state == DecisionState.ON_HOLD and row.guard_kinds == [GuardKind.SHARED_JOB],
            row.created_at,
        )
        for row in list_others(tx, run)
        if row.action != action or row.state not in TO_BE_STOPPED
    ]


def list_endangered_runs(tx: Transaction, run: Run, action: Action) -> list[JobRun]:
    """Those of these runs that the action would reach: all of the job's, unless a smaller part of it can be stopped. A
    copy reaches its own run alone."""
    return [other for other in list_spared_runs(tx, run, action) if _reaches(action, run, other.part)]


def has_pending_stop(tx: Transaction, run: Run, action: Action, after: datetime | None = None) -> bool:
    """Whether the stop of another live run of a run's job is pending (until after this time), so that it can still be
    vetoed, which a stop of the job would ignore."""
    pending = [
        row
        for row in list_others(tx, run)
        if row.state == DecisionState.PENDING and (after is None or row.due_at > after)
    ]
    return any(_reaches(action, run, find_job_part(row.labels)) for row in pending)


def _reaches(action: Action, run: Run, part: JobPart | None) -> bool:
    """Whether an action on a run also affects this part of its job."""
    if action is Action.EXPLOIT:
        return False
    return part is None or find_own_part(run, action) in (None, part)


def find_own_part(run: Run, action: Action) -> JobPart | None:
    """The part of its job that an action on a run may reach alone; None: all of the job. Jobs are parked whole."""
    own = find_job_part(run.labels) if action is Action.STOP else None
    return own if own is not None and own.can_be_ended else None


def _is_of_job(run: Run) -> sa.ColumnElement[bool]:
    """The condition for the other runs of a run's job."""
    return sa.and_(runs.c.project_id == run.project_id, runs.c.job_key == run.job_key, runs.c.id != run.id)


def list_others(tx: Transaction, run: Run) -> Sequence[sa.Row[Any]]:
    """The other live runs of a run's job, with the decisions on their current attempts."""
    if run.job_key is None:
        return []
    columns = (runs.c.id, runs.c.name, runs.c.labels, runs.c.created_at, decisions.c.id.label("decision_id"))
    query = sa.select(*columns, *(decisions.c[name] for name in _ASKED)).outerjoin(
        decisions, (decisions.c.run_id == runs.c.id) & (decisions.c.attempt == runs.c.attempt) & sa.text(ENDS_ATTEMPT)
    )
    return tx.execute(query.where(_is_of_job(run), runs.c.status.in_(OPEN)).order_by(runs.c.id)).all()


_ASKED = ("state", "guard_kinds", "action", "due_at")


def count_runs_alive(tx: Transaction, run: Run, at: datetime) -> int:
    """How many runs of a run's job, itself included, ran at this time."""
    if run.job_key is None:
        return 1
    ran = (runs.c.created_at <= at) & (runs.c.ended_at.is_(None) | (runs.c.ended_at >= at))
    return 1 + tx.execute(sa.select(sa.func.count()).where(_is_of_job(run), ran)).scalar_one()
