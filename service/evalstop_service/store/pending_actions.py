"""What needs a person's attention in a project: waiting stops, and running runs with a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import Action, DecisionState
from evalstop_service.domain.liveness import Liveness
from evalstop_service.domain.metric_health import MetricFault
from evalstop_service.domain.run_results import Call
from evalstop_service.domain.statuses import OPEN, RunStatus
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import decisions, run_health, runs

TO_DECIDE = (
    DecisionState.PENDING,
    DecisionState.FAILED,
    DecisionState.ESCALATED,
    DecisionState.ON_HOLD,
    DecisionState.PARKED,
)
"""The states of a decision in which a person may have to act, most urgent first."""

AWAITED = (DecisionState.REQUESTED, DecisionState.ACKNOWLEDGED)
"""The states in which the scheduler has to act."""


@dataclass(frozen=True)
class WaitingStop:
    """A decision that has not ended, on a running or parked run; `state_reason`: the reason for its state."""

    id: UUID
    run_id: UUID
    run_name: str
    action: Action
    state: DecisionState
    state_reason: str
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


Item = TypeVar("Item")


@dataclass(frozen=True)
class Excerpt(Generic[Item]):
    """The first items of a kind, and their total number."""

    items: Sequence[Item]
    count: int


def list_stops_to_decide(tx: Transaction, project_id: UUID, limit: int) -> Excerpt[WaitingStop]:
    """Stops of running runs that a person can act on, most urgent first.

    First those that will be sent unless somebody vetoes them, soonest first, then failed ones, unconfirmed ones, those
    on hold, and parked jobs.
    """
    names = ("id", "run_id", "action", "state", "state_reason", "step", "due_at", "created_at")
    reason = decisions.c.verdict["reason"].as_string().label("reason")
    query = sa.select(*(decisions.c[name] for name in names), runs.c.name.label("run_name"), reason)
    urgency = sa.case({state: rank for rank, state in enumerate(TO_DECIDE)}, value=decisions.c.state)
    rows, count = _first(tx, _of_running_runs(query, project_id, TO_DECIDE), (urgency, decisions.c.due_at), limit)
    return Excerpt([WaitingStop(**row._mapping) for row in rows], count)


def count_awaited_stops(tx: Transaction, project_id: UUID) -> int:
    """Stops that were requested and not yet confirmed."""
    query = _of_running_runs(sa.select(sa.func.count(decisions.c.id)), project_id, AWAITED)
    return int(tx.execute(query).scalar_one())


def count_suspect_runs(tx: Transaction, project_id: UUID) -> int:
    """Running runs whose policy suspects that they have turned."""
    query = sa.select(sa.func.count()).where(
        runs.c.project_id == project_id,
        runs.c.status == RunStatus.RUNNING,
        runs.c.verdict["verdict"].as_string() == Call.SUSPECT,
    )
    return tx.execute(query).scalar_one()


def list_stale_runs(tx: Transaction, project_id: UUID, limit: int) -> Excerpt[RunAlert]:
    """Running runs that were late with their posts at their last check, and the time of their last sign of life."""
    heartbeat_at = run_health.c.heartbeat_at
    heard_at = sa.case((heartbeat_at > runs.c.updated_at, heartbeat_at), else_=runs.c.updated_at)
    query = _select_alerts(project_id, sa.literal("silent"), heard_at)
    rows, count = _first(tx, query.where(run_health.c.state == Liveness.STALE), _NEWEST, limit)
    return Excerpt([RunAlert(*row) for row in rows], count)


def list_runs_without_data(tx: Transaction, project_id: UUID, limit: int) -> Excerpt[RunAlert]:
    """Running runs that had a watched metric without data at their last check."""
    query = _select_alerts(project_id, run_health.c.metric_faults, run_health.c.changed_at)
    rows, count = _first(tx, query.where(sa.cast(run_health.c.metric_faults, sa.Text) != "[]"), _NEWEST, limit)
    return Excerpt([RunAlert(row.id, row.name, _join_reasons(row.why), row.since) for row in rows], count)


def _join_reasons(faults: Sequence[MetricFault]) -> str:
    return "; ".join(f"{fault.metric}: {fault.reason}" for fault in faults)


def _select_alerts(project_id: UUID, why: Any, since: Any) -> sa.Select[Any]:
    query = sa.select(runs.c.id, runs.c.name, why.label("why"), since.label("since"))
    query = query.join_from(run_health, runs, runs.c.id == run_health.c.run_id)
    return query.where(
        run_health.c.project_id == project_id,
        run_health.c.next_check_at.is_not(None),
        runs.c.status == RunStatus.RUNNING,
    )


_NEWEST = (run_health.c.run_id.desc(),)


def _of_running_runs(query: sa.Select[Any], project_id: UUID, states: Sequence[DecisionState]) -> sa.Select[Any]:
    of_attempt = (runs.c.id == decisions.c.run_id) & (runs.c.attempt == decisions.c.attempt)
    return query.join_from(decisions, runs, of_attempt).where(
        runs.c.project_id == project_id, runs.c.status.in_(OPEN), decisions.c.state.in_(states)
    )


def _first(
    tx: Transaction, query: sa.Select[Any], order: Sequence[sa.ColumnElement[Any]], limit: int
) -> tuple[Sequence[Any], int]:
    rows = tx.execute(query.order_by(*order).limit(limit)).all()
    if len(rows) < limit:
        return rows, len(rows)
    return rows, tx.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()
