"""The runs of one job: what ends the job ends all of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import STOPPING, Action, DecisionState, GuardKind
from evalstop_service.domain.labels import JobPart, find_job_part
from evalstop_service.domain.statuses import OPEN
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import decisions, runs

TO_BE_STOPPED = STOPPING | {DecisionState.PENDING}


@dataclass(frozen=True)
class JobRun:
    """A live run in the job of another run. `waits`: its own stop is on hold for nothing but the runs of the job."""

    id: UUID
    name: str
    part: JobPart | None
    waits: bool


def list_spared_runs(tx: Transaction, run: Run, action: Action) -> list[JobRun]:
    """The other live runs in the job of a run for which nobody wants this action, oldest first."""
    if run.job_key is None:
        return []
    query = (
        sa.select(runs.c.id, runs.c.name, runs.c.labels, decisions.c.state, decisions.c.guard_kinds, decisions.c.action)
        .outerjoin(decisions, (decisions.c.run_id == runs.c.id) & (decisions.c.attempt == runs.c.attempt))
        .where(
            runs.c.project_id == run.project_id,
            runs.c.job_key == run.job_key,
            runs.c.id != run.id,
            runs.c.status.in_(OPEN),
        )
        .order_by(runs.c.id)
    )
    return [
        JobRun(
            row.id,
            row.name,
            find_job_part(row.labels),
            row.action == action and row.state == DecisionState.ON_HOLD and row.guard_kinds == [GuardKind.SHARED_JOB],
        )
        for row in tx.execute(query)
        if row.action != action or row.state not in TO_BE_STOPPED
    ]


def list_endangered_runs(tx: Transaction, run: Run, action: Action) -> list[JobRun]:
    """Those of these runs that the action would reach: all of the job's, unless a smaller part of it can be stopped."""
    own = None if action is Action.PARK else find_job_part(run.labels)
    spared = list_spared_runs(tx, run, action)
    if own is None or not own.can_be_ended:
        return spared
    return [other for other in spared if other.part is None or other.part == own]


def has_open_window(tx: Transaction, run: Run, action: Action, heard_until: datetime) -> bool:
    """Whether the stop of another live run of a run's job can still be vetoed, which a stop of the job would ignore."""
    if run.job_key is None:
        return False
    own = None if action is Action.PARK else find_job_part(run.labels)
    query = (
        sa.select(runs.c.labels)
        .join(decisions, (decisions.c.run_id == runs.c.id) & (decisions.c.attempt == runs.c.attempt))
        .where(
            runs.c.project_id == run.project_id,
            runs.c.job_key == run.job_key,
            runs.c.id != run.id,
            runs.c.status.in_(OPEN),
            decisions.c.state == DecisionState.PENDING,
            decisions.c.due_at > heard_until,
        )
    )
    parts = [find_job_part(row.labels) for row in tx.execute(query)]
    return any(own is None or not own.can_be_ended or part in (None, own) for part in parts)


def count_runs_alive(tx: Transaction, run: Run, at: datetime) -> int:
    """How many runs of a run's job, itself included, ran at this time."""
    if run.job_key is None:
        return 1
    query = sa.select(sa.func.count()).where(
        runs.c.project_id == run.project_id,
        runs.c.job_key == run.job_key,
        runs.c.id != run.id,
        runs.c.created_at <= at,
        runs.c.ended_at.is_(None) | (runs.c.ended_at >= at),
    )
    return 1 + tx.execute(query).scalar_one()


def list_held_too_late(tx: Transaction) -> list[tuple[UUID, UUID]]:
    """Project and run of each pending decision whose job has another live run that is not to be stopped."""
    other, others_decision = runs.alias(), decisions.alias()
    is_wanted = sa.exists().where(
        others_decision.c.run_id == other.c.id,
        others_decision.c.attempt == other.c.attempt,
        others_decision.c.action == decisions.c.action,
        others_decision.c.state.in_(TO_BE_STOPPED),
    )
    has_spared = sa.exists().where(
        other.c.project_id == runs.c.project_id,
        other.c.job_key == runs.c.job_key,
        other.c.id != runs.c.id,
        other.c.status.in_(OPEN),
        ~is_wanted,
    )
    query = sa.select(runs.c.project_id, runs.c.id).join(decisions, decisions.c.run_id == runs.c.id)
    # The state is inlined, not bound: only then does SQLite use the partial index.
    pending = decisions.c.state == sa.literal_column("'pending'")
    return [(row.project_id, row.id) for row in tx.execute(query.where(pending, has_spared))]
