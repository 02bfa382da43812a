"""Retention: runs that ended longer ago than their project keeps them lose their details, bit by bit, beside the work.

mark as pruned ──> remove observations, checkpoints, verdicts, events and deliveries ──> done
                   (broken off here, the next pass goes on)
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.clock import Clock, rfc3339
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import projects, retention
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project
from evalstop_service.store.retention import DeletePosition
from evalstop_service.store.runs import Run

log = logging.getLogger(__name__)

RUNS_AT_A_TIME = 100
EVERY_SECONDS = 3600.0


@dataclass(frozen=True)
class Pace:
    """How gently it is done.

    `rows`: the most that one transaction removes. After each there is a pause as long as it took, and at least
    `pause_seconds`: whoever writes meanwhile has half of the time at the least.
    """

    rows: int = 2_000
    pause_seconds: float = 0.02


@dataclass(frozen=True)
class Pruned:
    """What a pass did, or would do: `runs` by the name of their project, and the rows that these and what an earlier
    pass had left held."""

    runs: dict[str, int] = field(default_factory=dict)
    rows: int = 0


def refuse_if_pruned(run: Run) -> None:
    """Raise Conflict if the run has lost its details, so that nothing can be added to them."""
    if run.pruned_at is not None:
        raise Conflict(
            f"run {run.name!r} ended long ago and was pruned at {rfc3339(run.pruned_at)}: its observations and "
            "checkpoints are no longer on record, so it cannot go on; open a run under another name"
        )


def check_days(days: float | None) -> None:
    """Raise Invalid unless it is a time to keep runs for: at least a day, or None for ever."""
    if days is not None and not 1 <= days <= 36_500:
        raise Invalid(f"retention is {days} days; it may be 1 to 36500, or none at all to keep runs for ever")


def prune_runs(
    database: Database,
    now: datetime,
    *,
    project: str | None = None,
    older_than_days: float | None = None,
    dry_run: bool = False,
    pace: Pace = Pace(),
    pause: Wait | None = None,
    service_metrics: ServiceMetrics | None = None,
) -> Pruned:
    """Remove the details of all runs that ended before their project's time, of one project or of all of them.

    `older_than_days`: instead of the project's own; only with `project`. `dry_run`: count and leave everything.
    `pause`: waits so many seconds and says whether to stop; what is begun then goes on with the next pass.
    Raises NotFound, Invalid, and Conflict when another process is at it.
    """
    wanted = _wanted(database, project, older_than_days, now)
    if dry_run:
        return _count(database, wanted)
    with retention.hold_retention_lock(database) as alone:
        if not alone:
            raise Conflict("another process prunes at the moment; what is old goes with that")
        return _Pass(database, now, pace, pause or _sleep, service_metrics or ServiceMetrics()).run(wanted)


def create_job(
    database: Database,
    clock: Clock,
    service_metrics: ServiceMetrics,
    every_seconds: float = EVERY_SECONDS,
    pace: Pace = Pace(),
) -> PeriodicJob:
    """Pruning now and then, beside the work."""

    def do(pause: Wait) -> float:
        try:
            done = prune_runs(database, clock(), pace=pace, pause=pause, service_metrics=service_metrics)
        except Conflict:
            log.debug("another process prunes")
        else:
            if done.rows or done.runs:
                log.info("pruned %d runs, %d rows", sum(done.runs.values()), done.rows)
        return every_seconds

    return PeriodicJob("retention", do)


class _Pass:
    def __init__(
        self, database: Database, now: datetime, pace: Pace, pause: Wait, service_metrics: ServiceMetrics
    ) -> None:
        self._database = database
        self._now = now
        self._pace = pace
        self._pause = pause
        self._service_metrics = service_metrics
        self._rows = 0

    def run(self, wanted: list[tuple[Project, datetime]]) -> Pruned:
        found: dict[str, int] = {}
        if not self._empty():  # first what an earlier pass has left
            return Pruned(found, self._rows)
        for project, ended_before in wanted:
            while marked := self._mark(project, ended_before):
                found[project.name] = found.get(project.name, 0) + marked
                self._service_metrics.pruned_runs.inc(marked)
                if not self._empty():
                    return Pruned(found, self._rows)
        return Pruned(found, self._rows)

    def _mark(self, project: Project, ended_before: datetime) -> int:
        with self._database.reading() as tx:
            run_ids = retention.list_expired_runs(tx, project.id, ended_before, RUNS_AT_A_TIME)
        if not run_ids:
            return 0
        with self._database.transaction() as tx:
            return retention.mark_runs(tx, run_ids, ended_before, self._now)

    def _empty(self) -> bool:
        """Remove the details of all runs that are marked; False when it was told to stop before."""
        position: DeletePosition | None = None
        left = True
        while left:
            begun = time.perf_counter()
            with self._database.transaction() as tx:
                emptied = retention.delete_details(tx, self._pace.rows, position)
            position, left = emptied.position, emptied.left
            self._rows += emptied.rows
            self._service_metrics.pruned_rows.inc(emptied.rows)
            if (emptied.rows or left) and self._pause(max(self._pace.pause_seconds, time.perf_counter() - begun)):
                return False
        return True


def _wanted(
    database: Database, name: str | None, older_than_days: float | None, now: datetime
) -> list[tuple[Project, datetime]]:
    """Each project whose runs do not stay for ever, and the moment before which they must have ended."""
    check_days(older_than_days)
    if older_than_days is not None and name is None:
        raise Invalid("a time is given but no project: name the one whose runs shall go")
    with database.reading() as tx:
        if name is None:
            found = projects.list_projects(tx)
        else:
            one = projects.find_project_by_name(tx, name)
            if one is None:
                raise NotFound(f"there is no project {name!r}")
            found = [one]
    days = [(project, older_than_days or project.retention_days) for project in found]
    return [(project, now - timedelta(days=kept)) for project, kept in days if kept is not None]


def _count(database: Database, wanted: list[tuple[Project, datetime]]) -> Pruned:
    found, rows = {}, 0
    with database.reading() as tx:
        for project, ended_before in wanted:
            count, held = retention.count_expired_runs(tx, project.id, ended_before)
            rows += held
            if count:
                found[project.name] = count
    return Pruned(found, rows)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
