"""What needs a person's attention in a project: stops that wait, and running runs with a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.liveness import Liveness
from evalstop_service.rules.metric_health import MetricFault
from evalstop_service.rules.run_results import Call
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import decisions, run_health, runs

WAITING = (
    DecisionState.PENDING,
    DecisionState.ON_HOLD,
    DecisionState.REQUESTED,
    DecisionState.ACKNOWLEDGED,
    DecisionState.ESCALATED,
    DecisionState.FAILED,
)
"""The states of a decision on a run that still runs, in which a person may have something to do."""


@dataclass(frozen=True)
class WaitingStop:
    """A stop that has not ended, of a run that is still running."""

    id: UUID
    run_id: UUID
    run_name: str
    state: DecisionState
    step: int
    reason: str
    due_at: datetime
    created_at: datetime


@dataclass(frozen=True)
class RunAlert:
    """A running run and its problem."""

    id: UUID
    name: str
    why: str
    since: datetime


@dataclass(frozen=True)
class Excerpt:
    """The first of a kind, newest first, and how many there are."""

    items: Sequence[Any]
    count: int


def list_waiting_stops(tx: Transaction, project_id: UUID, limit: int) -> Excerpt:
    """Stops that wait for a veto, for what holds them back, or for a confirmation, the newest first."""
    query = sa.select(
        decisions.c.id,
        decisions.c.run_id,
        runs.c.name.label("run_name"),
        decisions.c.state,
        decisions.c.step,
        decisions.c.verdict["reason"].as_string().label("reason"),
        decisions.c.due_at,
        decisions.c.created_at,
    ).join(runs, (runs.c.id == decisions.c.run_id) & (runs.c.attempt == decisions.c.attempt))
    query = query.where(
        runs.c.project_id == project_id, runs.c.status == RunStatus.RUNNING, decisions.c.state.in_(WAITING)
    )
    rows, count = _first(tx, query, decisions.c.id, limit)
    return Excerpt([WaitingStop(**row) for row in rows], count)


def list_suspect_runs(tx: Transaction, project_id: UUID, limit: int) -> Excerpt:
    """Running runs whose policy suspects that they have turned."""
    verdict = runs.c.verdict
    query = sa.select(
        runs.c.id, runs.c.name, verdict["reason"].as_string().label("why"), runs.c.updated_at.label("since")
    ).where(
        runs.c.project_id == project_id,
        runs.c.status == RunStatus.RUNNING,
        verdict["verdict"].as_string() == Call.SUSPECT,
    )
    rows, count = _first(tx, query, runs.c.id, limit)
    return Excerpt([RunAlert(**row) for row in rows], count)


def list_stale_runs(tx: Transaction, project_id: UUID, limit: int) -> Excerpt:
    """Running runs of which nothing was heard for longer than is usual for them, as of the last look at each."""
    query = _looked_after(project_id, sa.literal("silent"), run_health.c.changed_at)
    rows, count = _first(tx, query.where(run_health.c.state == Liveness.STALE), run_health.c.run_id, limit)
    return Excerpt([RunAlert(**row) for row in rows], count)


def list_runs_without_data(tx: Transaction, project_id: UUID, limit: int) -> Excerpt:
    """Running runs with a watched metric without data, as of the last look at each."""
    query = _looked_after(project_id, run_health.c.metric_faults, run_health.c.changed_at)
    rows, count = _first(
        tx, query.where(sa.cast(run_health.c.metric_faults, sa.Text) != "[]"), run_health.c.run_id, limit
    )
    found = [dict(row) for row in rows]
    return Excerpt([RunAlert(**row | {"why": _join_reasons(row["why"])}) for row in found], count)


def _join_reasons(faults: Sequence[MetricFault]) -> str:
    return "; ".join(f"{fault.metric}: {fault.reason}" for fault in faults)


def _looked_after(project_id: UUID, why: Any, since: Any) -> sa.Select[Any]:
    query = sa.select(runs.c.id, runs.c.name, why.label("why"), since.label("since"))
    query = query.join_from(run_health, runs, runs.c.id == run_health.c.run_id)
    return query.where(
        run_health.c.project_id == project_id,
        run_health.c.next_check_at.is_not(None),
        runs.c.status == RunStatus.RUNNING,
    )


def _first(
    tx: Transaction, query: sa.Select[Any], newest: sa.ColumnElement[Any], limit: int
) -> tuple[Sequence[Any], int]:
    rows = tx.execute(query.order_by(newest.desc()).limit(limit)).mappings().all()
    if len(rows) < limit:
        return rows, len(rows)
    return rows, tx.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()
