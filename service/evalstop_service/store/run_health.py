"""Run health: whether a run is alive, when to check it again, and which of its metrics have no data.

Ingestion writes here only to record a step past its budget: a run's row says when it last posted. A change that depends
on the run's row locks that row first; a heartbeat locks only the health row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.health import NEWEST, Liveness, Reading
from evalstop_service.store.database import Transaction, find_all, insert_if_new
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import LIVE, observations, run_health
from evalstop_service.store.tables.runs import RunHealth as RunHealth

NEWEST_POSTS = 2000
"""How many of the newest values of each metric are used for the times of posts."""


def start_checks(
    tx: Transaction,
    run_id: UUID,
    project_id: UUID,
    next_check_at: datetime,
    now: datetime,
    *,
    heartbeat_at: datetime | None = None,
) -> None:
    """Start to check a run, as alive: it was opened, or it continues after its end."""
    fresh = RunHealth(run_id, project_id, Liveness.ALIVE, next_check_at, now, heartbeat_at)
    if not insert_if_new(tx, run_health, vars(fresh), ["run_id"]):
        restarted = {"state": Liveness.ALIVE, "next_check_at": next_check_at, "changed_at": now}
        tx.execute(run_health.update().where(run_health.c.run_id == run_id).values(restarted))


def record_heartbeat(tx: Transaction, run_id: UUID, project_id: UUID, now: datetime) -> None:
    """Record a heartbeat of a run that is or will be checked."""
    if tx.execute(run_health.update().where(run_health.c.run_id == run_id).values(heartbeat_at=now)).rowcount == 0:
        start_checks(tx, run_id, project_id, now, now, heartbeat_at=now)


def record_costly_step(tx: Transaction, run_id: UUID, seconds: float) -> None:
    """Record the time of a detector step that exceeded the budget."""
    tx.execute(run_health.update().where(run_health.c.run_id == run_id).values(costly_step_seconds=seconds))


def load_health(tx: Transaction, run_ids: Collection[UUID]) -> dict[UUID, RunHealth]:
    """The health of those of these runs that have a row."""
    query = sa.select(run_health).where(run_health.c.run_id.in_(list(run_ids)))
    return {health.run_id: health for health in find_all(tx, RunHealth, query)}


_KEPT_BY_CHECKS = ("run_id", "heartbeat_at", "costly_step_seconds")


def save_health(tx: Transaction, health: RunHealth) -> None:
    """Store the result of checking a run, which is locked; heartbeats are left unchanged."""
    values = {name: value for name, value in vars(health).items() if name not in _KEPT_BY_CHECKS}
    tx.execute(run_health.update().where(run_health.c.run_id == health.run_id).values(values))


class DueCheck(NamedTuple):
    """A run to check."""

    run_id: UUID
    project_id: UUID


def claim_due_checks(tx: Transaction, now: datetime, limit: int) -> list[DueCheck]:
    """Up to `limit` runs to check now, longest due first, whose health is locked until the transaction ends; rows that
    another transaction has locked are skipped."""
    due = sa.select(run_health.c.run_id, run_health.c.project_id).where(run_health.c.next_check_at <= now)
    query = due.order_by(run_health.c.next_check_at).limit(limit).with_for_update(skip_locked=True)
    return [DueCheck(*row) for row in tx.execute(query)]


def postpone_checks(tx: Transaction, next_checks: Mapping[UUID, datetime | None]) -> None:
    """Postpone the next check of unchanged runs; None: no further check."""
    if next_checks:
        later = (
            run_health.update()
            .where(run_health.c.run_id == sa.bindparam("run"))
            .values(next_check_at=sa.bindparam("at"))
        )
        tx.execute(later, [{"run": run_id, "at": at} for run_id, at in next_checks.items()])


def list_post_times(tx: Transaction, run: Run) -> list[list[datetime]]:
    """For each watched metric the times of its newest values, as `health.measure_cadence` takes them."""
    newest = (_select_newest(run, metric, NEWEST_POSTS) for metric in run.metrics)
    return [list(tx.execute(query.with_only_columns(observations.c.received_at)).scalars()) for query in newest]


def load_readings(tx: Transaction, series: Sequence[tuple[Run, str]]) -> dict[tuple[UUID, str], list[Reading]]:
    """The newest readings of these metrics of runs, each by ascending step."""
    return {
        (run.id, metric): [Reading(*row) for row in tx.execute(_select_newest(run, metric, NEWEST))][::-1]
        for run, metric in series
    }


def _select_newest(run: Run, metric: str, most: int) -> sa.Select[Any]:
    """A metric's newest live observations. Those past the run's last step, possibly very many, are superseded."""
    table = observations.c
    last_step = -1 if run.last_step is None else run.last_step
    return (
        sa.select(table.step, table.value, table.received_at)
        .where(table.run_id == run.id, table.metric == metric, table.superseded_by == LIVE, table.step <= last_step)
        .order_by(table.step.desc())
        .limit(most)
    )
