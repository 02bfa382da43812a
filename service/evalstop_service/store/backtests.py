"""Backtests: policies replayed on past runs, and their findings."""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa

from evalstop_service.errors import require
from evalstop_service.store.database import Transaction, find_one, find_page
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import backtests, runs
from evalstop_service.store.tables.decisions import Backtest as Backtest
from evalstop_service.store.tables.decisions import BacktestFinding as BacktestFinding


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


def list_past_runs(tx: Transaction, project_id: UUID, before: UUID, limit: int) -> list[Run]:
    """Runs that have ended and were not pruned, with ids below `before`, newest first."""
    is_past = (runs.c.project_id == project_id, runs.c.ended_at.is_not(None), runs.c.pruned_at.is_(None))
    return find_page(tx, Run, sa.select(runs).where(*is_past), runs.c.id, before, limit)
