"""Backtests: policies replayed on past runs, their findings so far, and the lease of the worker that runs each.

waiting ──> running ──> done       each saved step extends the worker's lease; a worker that takes over after it
                 └────> failed     expired continues after the last run saved; who saves a step first, saves it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import BacktestState, RunOutcome
from evalstop_service.errors import require
from evalstop_service.store.database import Transaction, find_one, find_page
from evalstop_service.store.runs import POLICY_COLUMNS, Run
from evalstop_service.store.tables import attempts, backtests, cases, decisions, policies, runs
from evalstop_service.store.tables.decisions import Backtest as Backtest
from evalstop_service.store.tables.decisions import BacktestFinding as BacktestFinding


@dataclass(frozen=True)
class PastRun:
    """A run that has ended, with the decision on its last attempt and the outcome of that attempt."""

    run: Run
    began_at_step: int
    decision_id: UUID | None
    decided_step: int | None
    state: DecisionState | None
    run_outcome: RunOutcome | None
    turn_step: int | None
    gpu_hours: float | None


def add_backtest(tx: Transaction, backtest: Backtest) -> None:
    """Store a new one."""
    tx.execute(backtests.insert().values(vars(backtest)))


def load_backtest(tx: Transaction, project_id: UUID, backtest_id: UUID) -> Backtest:
    """The project's backtest with this id; raises NotFound."""
    query = sa.select(backtests).where(backtests.c.project_id == project_id, backtests.c.id == backtest_id)
    return require(find_one(tx, Backtest, query), f"backtest {backtest_id} in this project")


def read_revision(tx: Transaction, project_id: UUID, backtest_id: UUID) -> str | None:
    """A value that changes whenever the backtest makes progress; None when there is no such backtest."""
    query = sa.select(backtests.c.state, backtests.c.done, backtests.c.total)
    row = tx.execute(query.where(backtests.c.project_id == project_id, backtests.c.id == backtest_id)).one_or_none()
    return "-".join(map(str, row)) if row else None


def list_backtests(tx: Transaction, project_id: UUID, *, before: UUID | None = None, limit: int) -> list[Backtest]:
    """A project's backtests, newest first, without their findings."""
    columns = [column for column in backtests.c if column.name != "findings"]
    query = sa.select(*columns).where(backtests.c.project_id == project_id)
    return find_page(tx, Backtest, query, backtests.c.id, before, limit)


def count_unfinished(tx: Transaction, project_id: UUID) -> int:
    """How many backtests of a project are waiting or running."""
    query = sa.select(sa.func.count()).where(backtests.c.project_id == project_id, _UNFINISHED)
    return tx.execute(query).scalar_one()


def claim_backtest(tx: Transaction, now: datetime, lease_until: datetime) -> Backtest | None:
    """Lease the oldest backtest without a lease until `lease_until`; None when there is none."""
    free = backtests.c.lease_until.is_(None) | (backtests.c.lease_until <= now)
    query = sa.select(backtests).where(_UNFINISHED, free).order_by(backtests.c.id).limit(1)
    backtest = find_one(tx, Backtest, query.with_for_update(skip_locked=True))
    if backtest is None:
        return None
    leased = replace(backtest, state=BacktestState.RUNNING, lease_until=lease_until)
    tx.execute(backtests.update().where(backtests.c.id == leased.id).values(vars(leased)))
    return leased


def save_progress(tx: Transaction, leased: Backtest, changed: Backtest) -> bool:
    """Save progress; False, with nothing saved, when another worker has replayed the same runs.

    A worker whose lease has expired may save: if each step took longer than the lease, workers that take over from each
    other would otherwise never save one.
    """
    query = backtests.update().where(
        backtests.c.id == leased.id, backtests.c.state == BacktestState.RUNNING, backtests.c.done == leased.done
    )
    return tx.execute(query.values(vars(changed))).rowcount == 1


def count_past_runs(tx: Transaction, project_id: UUID, before: UUID, most: int) -> int:
    """How many runs there are to replay, up to `most`."""
    query = _select_ended(sa.select(runs.c.id), project_id, before).limit(most)
    return tx.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()


def load_past_runs(tx: Transaction, project_id: UUID, before: UUID, limit: int) -> list[PastRun]:
    """Runs that have ended and were not pruned, with ids below `before`, newest first."""
    page = _select_ended(sa.select(*runs.c), project_id, before).order_by(runs.c.id.desc()).limit(limit).subquery()
    query = (
        sa.select(
            page,
            *POLICY_COLUMNS,
            sa.func.coalesce(attempts.c.resumed_from_step, 0),
            decisions.c.id,
            decisions.c.step,
            decisions.c.state,
            cases.c.run_outcome,
            cases.c.turn_step,
            cases.c.gpu_hours,
        )
        .join(policies, policies.c.id == page.c.policy_id)
        .join(attempts, (attempts.c.run_id == page.c.id) & (attempts.c.attempt == page.c.attempt))
        .outerjoin(
            decisions,
            (decisions.c.run_id == page.c.id) & (decisions.c.attempt == page.c.attempt) & decisions.c.group.is_(None),
        )
        .outerjoin(cases, (cases.c.run_id == page.c.id) & (cases.c.attempt == page.c.attempt))
        .order_by(page.c.id.desc())
    )
    names = [column.name for column in (*runs.c, *POLICY_COLUMNS)]
    rows = (tuple(row) for row in tx.execute(query))
    return [PastRun(Run(**dict(zip(names, row, strict=False))), *row[len(names) :]) for row in rows]


def _select_ended(query: sa.Select[Any], project_id: UUID, before: UUID) -> sa.Select[Any]:
    return query.where(
        runs.c.project_id == project_id, runs.c.id < before, runs.c.ended_at.is_not(None), runs.c.pruned_at.is_(None)
    )


_UNFINISHED = backtests.c.state.in_((BacktestState.WAITING, BacktestState.RUNNING))
