"""Backtests: policies replayed on past runs, and their findings."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import RunOutcome
from evalstop_service.errors import require
from evalstop_service.store.database import Transaction, find_one, find_page, read_columns
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import attempts, backtests, cases, decisions, runs
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


def list_backtests(tx: Transaction, project_id: UUID, limit: int) -> list[Backtest]:
    """The newest backtests of a project, newest first, without their findings."""
    columns = [column for column in backtests.c if column.name != "findings"]
    query = sa.select(*columns).where(backtests.c.project_id == project_id)
    return find_page(tx, Backtest, query, backtests.c.id, None, limit)


def load_past_runs(tx: Transaction, project_id: UUID, before: UUID, limit: int) -> list[PastRun]:
    """Runs that have ended and were not pruned, with ids below `before`, newest first."""
    is_past = (runs.c.id < before, runs.c.ended_at.is_not(None), runs.c.pruned_at.is_(None))
    ended = sa.select(*runs.c).where(runs.c.project_id == project_id, *is_past)
    page = ended.order_by(runs.c.id.desc()).limit(limit).subquery()
    query = (
        sa.select(
            page,
            sa.func.coalesce(attempts.c.resumed_from_step, 0),
            decisions.c.id,
            decisions.c.step,
            decisions.c.state,
            cases.c.run_outcome,
            cases.c.turn_step,
            cases.c.gpu_hours,
        )
        .join(attempts, (attempts.c.run_id == page.c.id) & (attempts.c.attempt == page.c.attempt))
        .outerjoin(
            decisions,
            (decisions.c.run_id == page.c.id) & (decisions.c.attempt == page.c.attempt) & decisions.c.group.is_(None),
        )
        .outerjoin(cases, (cases.c.run_id == page.c.id) & (cases.c.attempt == page.c.attempt))
        .order_by(page.c.id.desc())
    )
    return [PastRun(Run(**read_columns(row._mapping, page.c)), *row[len(page.c) :]) for row in tx.execute(query)]
