"""Pruning removes the details of runs that ended long ago, those and nothing else, and stands in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from evalstop_service import background
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.runs import retention
from evalstop_service.runs.retention import Pace, PruneResult
from evalstop_service.store import retention as rows
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.service.aged import (
    AT_ONCE,
    KEEP_DAYS,
    NOW,
    a_scene,
    deliver,
    end,
    ended,
    held,
    is_empty,
    is_marked,
    name_of,
)

KEPT = (
    tables.runs,
    tables.attempts,
    tables.mlflow_runs,
    tables.run_descriptions,
    tables.logged_models,
    tables.decisions,
    tables.decision_changes,
    tables.outcomes,
    tables.cases,
)
"""What pruning leaves of a run."""

on_one_database = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def test_every_table_is_either_removed_or_kept() -> None:
    """Whoever adds a table with rows of runs decides what becomes of them; none is forgotten, none is in both."""
    of_runs = {table for table in tables.metadata.tables.values() if "run_id" in table.c} - {tables.run_deletions}
    assert set(rows.REMOVED) | set(KEPT) == of_runs | {tables.runs}
    assert set(rows.REMOVED) & set(KEPT) == set()


@dataclass(frozen=True)
class Told:
    """A run as Hypothesis tells of it."""

    of_second: bool
    days_ago: float | None
    delivery: str | None
    enabled: bool
    points: int

    @property
    def is_old(self) -> bool:
        waits = self.delivery == "waiting" and self.enabled
        return not self.of_second and self.days_ago is not None and self.days_ago > KEEP_DAYS and not waits


RUNS = st.lists(
    st.builds(
        Told,
        of_second=st.booleans(),
        days_ago=st.none() | st.sampled_from([0.0, KEEP_DAYS - 0.001, KEEP_DAYS + 0.001, 400.0]),
        delivery=st.sampled_from([None, "waiting", "delivered", "dead"]),
        enabled=st.booleans(),
        points=st.integers(0, 12),
    ),
    max_size=6,
)


@on_one_database
@example([Told(False, 400.0, "waiting", True, 1), Told(False, 400.0, "waiting", False, 1)], 10)
@given(RUNS, st.integers(1, 40))
def test_removes_exactly_what_ended_long_ago(database: Database, told: list[Told], batch: int) -> None:
    """Of the ended and old runs all details go and the rest stays; of all others not a row is touched.

    `told` holds runs of a project that keeps them for a month and of one that keeps them for ever.
    """
    first, second = a_scene(database), a_scene(database, None)
    made: list[Run] = []
    for one in told:
        project = second if one.of_second else first
        made.append(ended(project, one.days_ago, one.points))
        if one.delivery is not None:
            with database.transaction() as tx:
                deliver(tx, project, made[-1], one.delivery, enabled=one.enabled)
    everything = (*rows.REMOVED, *KEPT, tables.run_deletions)
    before = [held(database, run, everything) for run in made]
    done = retention.prune_runs(database, NOW, pace=Pace(rows=batch, pause_seconds=0))
    assert done.runs == ({name_of(first): sum(one.is_old for one in told)} if any(one.is_old for one in told) else {})
    for one, run, was in zip(told, made, before, strict=True):
        project = second if one.of_second else first
        assert is_marked(project, run) == one.is_old
        if one.is_old:
            assert is_empty(database, run)
            kept = held(database, run, (*KEPT[1:], tables.run_deletions))
            assert kept == {name: was[name] for name in kept}
            now = project.load_run(run)
            assert (now.pruned_at, now.version) == (NOW, run.version + 1)
            assert (now.updated_at, now.verdict, now.best_checkpoint) == (run.updated_at, run.verdict, None)
        else:
            assert held(database, run, everything) == was


@on_one_database
@given(st.integers(1, 60), st.integers(0, 25), st.booleans())
def test_no_transaction_removes_more_than_it_may(database: Database, limit: int, points: int, forgetful: bool) -> None:
    """A transaction removes no more rows than it was given, and all of them together everything, whether or not each
    knows where the one before it stopped."""
    project = a_scene(database)
    runs = [ended(project, 100, points) for _ in range(3)]
    with database.transaction() as tx:
        for run in runs:
            deliver(tx, project, run, "dead", enabled=True)
    total = sum(len(found) for run in runs for found in held(database, run, rows.REMOVED).values())
    with database.transaction() as tx:
        assert rows.mark_runs(tx, [run.id for run in runs], NOW, NOW) == 3
    removed, position, left = 0, None, True
    while left:
        with database.transaction() as tx:
            emptied = rows.delete_details(tx, limit, None if forgetful else position)
        assert emptied.rows <= limit
        removed, position, left = removed + emptied.rows, emptied.position, emptied.left
    assert removed == total
    assert all(is_empty(database, run) for run in runs)
    assert all(held(database, run, (tables.run_deletions,)) == {"run_deletions": []} for run in runs)


def test_broken_off_it_goes_on(database: Database) -> None:
    """Stopped after any transaction, what was begun is marked from the start and is ended by the next pass."""
    project = a_scene(database)
    runs = [ended(project, 100 + number) for number in range(3)]
    whole = [held(database, run, rows.REMOVED) for run in runs]
    passes = 0
    while not all(is_empty(database, run) for run in runs):
        done = retention.prune_runs(database, NOW, pace=Pace(rows=17, pause_seconds=0), pause=lambda _: True)
        assert done.rows <= 17
        for run, all_of_it in zip(runs, whole, strict=True):
            assert is_marked(project, run) or held(database, run, rows.REMOVED) == all_of_it
        passes += 1
        assert passes < 50
    assert passes > 5
    assert retention.prune_runs(database, NOW) == PruneResult()


def test_a_dry_run_tells_and_leaves(database: Database) -> None:
    """It counts the very runs and rows that would go, and goes no further."""
    project = a_scene(database)
    runs = [ended(project, 100, points=3), ended(project, 40, points=5), ended(project, 10, points=7)]
    told = retention.prune_runs(database, NOW, dry_run=True)
    assert not any(is_marked(project, run) for run in runs)
    assert retention.prune_runs(database, NOW, pace=AT_ONCE) == told
    assert told.runs == {name_of(project): 2}
    assert retention.prune_runs(database, NOW, dry_run=True) == PruneResult()


def test_a_time_can_be_given_for_one_project(database: Database) -> None:
    """A time that is given takes the place of the project's own, for longer or shorter, and is for it alone."""
    project, other = a_scene(database, None), a_scene(database, 365)
    runs = [ended(project, 10), ended(project, 3)], [ended(other, 200)]
    retention.prune_runs(database, NOW, project=name_of(project), older_than_days=5, pace=AT_ONCE)
    assert [is_marked(project, run) for run in runs[0]] == [True, False]
    assert not is_marked(other, runs[1][0])
    assert retention.prune_runs(database, NOW, project=name_of(project)) == PruneResult()


@pytest.mark.parametrize(
    ("project", "days", "error"),
    [(None, 5.0, Invalid), ("nobody's", None, NotFound), ("any", 0.5, Invalid), ("any", -1.0, Invalid)],
)
def test_what_makes_no_sense_is_refused(
    embedded_database: Database, project: str | None, days: float | None, error: type[Exception]
) -> None:
    """A time for all projects at once, a project that is none, and less than a day: nothing goes by mistake."""
    with pytest.raises(error):
        retention.prune_runs(embedded_database, NOW, project=project, older_than_days=days)


def test_nothing_can_be_added_to_a_pruned_run(embedded_database: Database) -> None:
    """Whoever posts to it or resumes it is told what became of it and what to do."""
    project = a_scene(embedded_database)
    run = ended(project, 100)
    retention.refuse_pruned_run(project.load_run(run))
    retention.prune_runs(embedded_database, NOW, pace=AT_ONCE)
    with pytest.raises(Conflict, match=r"pruned at 2026-06-01.*open a run under another name"):
        retention.refuse_pruned_run(project.load_run(run))


def test_it_is_counted(embedded_database: Database) -> None:
    """Runs and rows that went are counted, and what a pass says is what is counted."""
    ended(a_scene(embedded_database), 100)
    service_metrics = ServiceMetrics()
    done = retention.prune_runs(embedded_database, NOW, pace=AT_ONCE, service_metrics=service_metrics)
    assert value(service_metrics.registry, "evalstop_pruned_runs_total") == sum(done.runs.values()) == 1
    assert value(service_metrics.registry, "evalstop_pruned_rows_total") == done.rows == 20 * 2 + 3 + 3 + 1 + 1


def value(registry: CollectorRegistry, name: str) -> float:
    found = registry.get_sample_value(name)
    assert found is not None
    return found


def test_as_a_chore_it_comes_back(database: Database) -> None:
    """Beside a worker it prunes now and then."""
    project = a_scene(database)
    first, second = ended(project, 100), ended(project, 10)
    with background.run_jobs(retention.create_job(database, lambda: NOW, ServiceMetrics(), every_seconds=0.01)):
        wait_until(lambda: is_empty(database, first))
        with database.transaction() as tx:
            end(tx, second, NOW - timedelta(days=300))
        wait_until(lambda: is_empty(database, second))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = datetime.now(UTC) + timedelta(seconds=30)
    waiting = threading.Event()
    while not condition():
        assert datetime.now(UTC) < deadline
        waiting.wait(0.01)
