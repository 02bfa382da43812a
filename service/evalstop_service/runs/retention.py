"""Retention: removes the details of runs that ended longer ago than their project keeps them, in the background.

mark as pruned ──> remove observations, checkpoints, verdicts, events and deliveries ──> done
                   (the next pass continues what was interrupted)
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.clock import Clock, rfc3339
from evalstop_service.errors import Conflict
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import projects, retention
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run

log = logging.getLogger(__name__)

RUNS_AT_A_TIME, ROWS_AT_A_TIME = 100, 2_000
EVERY_SECONDS = 3600.0


@dataclass
class PruneResult:
    """What a pass removed: the number of runs by project name, and of rows."""

    runs: Counter[str] = field(default_factory=Counter)
    rows: int = 0


def refuse_pruned_run(run: Run) -> None:
    """Raise Conflict if the details of the run were removed, so that nothing can be added to it."""
    if run.pruned_at is not None:
        raise Conflict(
            f"run {run.name!r} ended long ago and was pruned at {rfc3339(run.pruned_at)}: its observations and "
            "checkpoints were deleted, so it cannot be resumed; open a run under another name"
        )


def prune_runs(
    database: Database,
    now: datetime,
    *,
    rows: int = ROWS_AT_A_TIME,
    pause: Wait = lambda _: False,
    service_metrics: ServiceMetrics | None = None,
) -> PruneResult:
    """Remove the details of runs that ended longer ago than their project keeps them, in transactions of so many rows.

    `pause`: waits this many seconds and returns whether to stop; the next pass continues. Several processes may prune
    at the same time: what one has removed, the others find gone.
    """
    metrics, result = service_metrics or ServiceMetrics(), PruneResult()
    with database.reading() as tx:
        listed = [project for project in projects.list_projects(tx) if project.retention_days is not None]
    for project in listed:
        ended_before = now - timedelta(days=project.retention_days or 0)
        marked = RUNS_AT_A_TIME
        while marked == RUNS_AT_A_TIME:
            started = time.perf_counter()
            with database.transaction() as tx:
                marked = retention.mark_runs(tx, project.id, ended_before, now, RUNS_AT_A_TIME)
            result.runs += Counter({project.name: marked})  # which leaves out zero
            metrics.pruned_runs.inc(marked)
            if marked == RUNS_AT_A_TIME and pause(time.perf_counter() - started):
                return result
    has_more = True
    while has_more:
        started = time.perf_counter()
        with database.transaction() as tx:
            removed, has_more = retention.delete_details(tx, rows)
        result.rows += removed
        metrics.pruned_rows.inc(removed)
        # As long as that took, so that other writers have half of the time.
        if has_more and pause(time.perf_counter() - started):
            break
    return result


def create_job(
    database: Database, clock: Clock, service_metrics: ServiceMetrics, every_seconds: float = EVERY_SECONDS
) -> PeriodicJob:
    """The periodic job that prunes runs."""

    def prune(pause: Wait) -> None:
        result = prune_runs(database, clock(), pause=pause, service_metrics=service_metrics)
        if result.rows or result.runs:
            log.info("pruned %d runs, %d rows", result.runs.total(), result.rows)

    return PeriodicJob("retention", prune, every_seconds)
