"""Retention: removes the details of runs that ended longer ago than their project keeps them, in the background.

mark as pruned ──> remove observations, checkpoints, verdicts, events and deliveries ──> done
                   (the next pass continues what was interrupted)
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.clock import Clock, rfc3339
from evalstop_service.errors import Conflict
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import projects, retention
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

log = logging.getLogger(__name__)

RUNS_AT_A_TIME = 100
EVERY_SECONDS = 3600.0


@dataclass(frozen=True)
class Pace:
    """How much load pruning causes.

    `rows`: the most that one transaction removes. The pause after each is as long as it took, and at least
    `pause_seconds`, so that other writers have at least half of the time.
    """

    rows: int = 2_000
    pause_seconds: float = 0.02


@dataclass(frozen=True)
class PruneResult:
    """What a pass removed: the number of runs by project name, and of rows."""

    runs: dict[str, int] = field(default_factory=dict)
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
    pace: Pace = Pace(),
    pause: Wait | None = None,
    service_metrics: ServiceMetrics | None = None,
) -> PruneResult:
    """Remove the details of runs that ended longer ago than their project keeps them.

    `pause`: waits this many seconds and returns whether to stop; the next pass continues. Several processes may prune
    at the same time: what one has removed, the others find gone.
    """
    with database.reading() as tx:
        limits = [
            (project, now - timedelta(days=project.retention_days))
            for project in projects.list_projects(tx)
            if project.retention_days is not None
        ]
    return _Pass(database, now, pace, pause or _sleep, service_metrics or ServiceMetrics()).run(limits)


def create_job(
    database: Database, clock: Clock, service_metrics: ServiceMetrics, every_seconds: float = EVERY_SECONDS
) -> PeriodicJob:
    """The periodic job that prunes runs."""

    def prune(pause: Wait) -> float:
        result = prune_runs(database, clock(), pause=pause, service_metrics=service_metrics)
        if result.rows or result.runs:
            log.info("pruned %d runs, %d rows", sum(result.runs.values()), result.rows)
        return every_seconds

    return PeriodicJob("retention", prune)


@dataclass
class _Pass:
    database: Database
    now: datetime
    pace: Pace
    pause: Wait
    service_metrics: ServiceMetrics
    rows: int = 0

    def run(self, limits: list[tuple[Project, datetime]]) -> PruneResult:
        runs: dict[str, int] = {}
        goes_on = self._empty_runs()  # first finish an interrupted pass
        for project, ended_before in limits:
            while goes_on and (marked := self._mark_runs(project, ended_before)):
                runs[project.name] = runs.get(project.name, 0) + marked
                self.service_metrics.pruned_runs.inc(marked)
                goes_on = self._empty_runs()
        return PruneResult(runs, self.rows)

    def _mark_runs(self, project: Project, ended_before: datetime) -> int:
        with self.database.reading() as tx:
            run_ids = retention.list_expired_runs(tx, project.id, ended_before, RUNS_AT_A_TIME)
        if not run_ids:
            return 0
        with self.database.transaction() as tx:
            return retention.mark_runs(tx, run_ids, ended_before, self.now)

    def _empty_runs(self) -> bool:
        """Remove the details of all marked runs; False if asked to stop before the end."""
        has_more = True
        while has_more:
            started = time.perf_counter()
            with self.database.transaction() as tx:
                removed, has_more = retention.delete_details(tx, self.pace.rows)
            self.rows += removed
            self.service_metrics.pruned_rows.inc(removed)
            if (removed or has_more) and self.pause(max(self.pace.pause_seconds, time.perf_counter() - started)):
                return False
        return True


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
