"""Pruning removes the details of runs that ended long ago, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.errors import Conflict
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.runs import retention
from evalstop_service.runs.retention import PruneResult
from evalstop_service.store import retention as rows
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.service.ended_runs import (
    FEW_ROWS,
    KEEP_DAYS,
    NOW,
    add_delivery,
    add_ended_run,
    has_no_details,
    is_marked_pruned,
    load_project_name,
    load_tables,
    set_up_project_with_retention,
)
from tests.service.project_fixture import evals

KEPT = (
    tables.runs,
    tables.attempts,
    tables.mlflow_runs,
    tables.run_descriptions,
    tables.decisions,
    tables.decision_changes,
    tables.outcomes,
    tables.cases,
    tables.case_calls,
)
"""Tables whose rows pruning keeps."""

shared_database_settings = settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def test_run_keeps_its_details_until_its_stop_is_confirmed(database: Database) -> None:
    """A receiver may still report on the stop: that it was addressed, and the evals, are needed for it. A report on a
    stop that has failed, which is not awaited, leaves the change point of the pruned run."""
    project = set_up_project_with_retention(database)
    run = project.open_run()
    project.post_observations(
        run, evals(*(0.1 * step for step in range(10)), *(0.9 - 0.1 * step for step in range(10)))
    )
    decision = project.load_decision(run)
    project.record_report(decision, DecisionState.ACKNOWLEDGED, NOW)
    project.finish_run(run, now=NOW)
    turn = project.load_run(run).turn
    assert turn is not None
    long_after = NOW + timedelta(days=KEEP_DAYS + 1)
    assert retention.prune_runs(database, long_after, rows=FEW_ROWS).runs == {}
    for state in (DecisionState.FAILED, DecisionState.CONFIRMED):
        project.record_report(decision, state, long_after)
        retention.prune_runs(database, long_after, rows=FEW_ROWS)
        assert is_marked_pruned(project, run)
        assert project.load_run(run).turn == turn


def test_every_table_is_either_removed_or_kept() -> None:
    """Every table with rows of runs is either pruned or kept."""
    run_tables = {table for table in tables.metadata.tables.values() if "run_id" in table.c} - {tables.run_deletions}
    run_tables -= {tables.running_runs}  # whose rows go when a run ends
    assert set(rows.REMOVED) | set(KEPT) == run_tables | {tables.runs}
    assert set(rows.REMOVED) & set(KEPT) == set()


@dataclass(frozen=True)
class DrawnRun:
    """A run as drawn by Hypothesis."""

    in_second_project: bool
    days_ago: float | None
    delivery: str | None
    enabled: bool
    observation_count: int

    @property
    def is_old(self) -> bool:
        waits = self.delivery == "waiting" and self.enabled
        return not self.in_second_project and self.days_ago is not None and self.days_ago > KEEP_DAYS and not waits


RUNS = st.lists(
    st.builds(
        DrawnRun,
        in_second_project=st.booleans(),
        days_ago=st.none() | st.sampled_from([0.0, KEEP_DAYS - 0.001, KEEP_DAYS + 0.001, 400.0]),
        delivery=st.sampled_from([None, "waiting", "delivered", "dead"]),
        enabled=st.booleans(),
        observation_count=st.integers(0, 12),
    ),
    max_size=6,
)


@pytest.mark.slow
@shared_database_settings
@example([DrawnRun(False, 400.0, "waiting", True, 1), DrawnRun(False, 400.0, "waiting", False, 1)], 10)
@given(RUNS, st.integers(1, 40))
def test_prune_removes_only_old_ended_runs(database: Database, drawn: list[DrawnRun], batch: int) -> None:
    """The details of old ended runs are removed and the rest stays; other runs keep every row."""
    first, second = set_up_project_with_retention(database), set_up_project_with_retention(database, None)
    runs: list[Run] = []
    for drawn_run in drawn:
        project = second if drawn_run.in_second_project else first
        runs.append(add_ended_run(project, drawn_run.days_ago, drawn_run.observation_count))
        if drawn_run.delivery is not None:
            with database.transaction() as tx:
                add_delivery(tx, project, runs[-1], drawn_run.delivery, enabled=drawn_run.enabled)
    all_tables = (*rows.REMOVED, *KEPT, tables.run_deletions)
    before = [load_tables(database, run, all_tables) for run in runs]
    result = retention.prune_runs(database, NOW, rows=batch)
    assert result.runs == (
        {load_project_name(first): sum(drawn_run.is_old for drawn_run in drawn)}
        if any(drawn_run.is_old for drawn_run in drawn)
        else {}
    )
    for drawn_run, run, rows_before in zip(drawn, runs, before, strict=True):
        project = second if drawn_run.in_second_project else first
        assert is_marked_pruned(project, run) == drawn_run.is_old
        if drawn_run.is_old:
            assert has_no_details(database, run)
            remaining = load_tables(database, run, (*KEPT[1:], tables.run_deletions))
            assert remaining == {name: rows_before[name] for name in remaining}
            now = project.load_run(run)
            assert (now.pruned_at, now.version) == (NOW, run.version + 1)
            assert (now.updated_at, now.verdict, now.best_checkpoint) == (run.updated_at, run.verdict, None)
        else:
            assert load_tables(database, run, all_tables) == rows_before


@pytest.mark.slow
@shared_database_settings
@given(st.integers(1, 60), st.integers(0, 25))
def test_transactions_respect_their_row_limit(database: Database, limit: int, observation_count: int) -> None:
    """A transaction removes at most its limit, and together they remove everything."""
    project = set_up_project_with_retention(database)
    runs = [add_ended_run(project, 100, observation_count) for _ in range(3)]
    with database.transaction() as tx:
        for run in runs:
            add_delivery(tx, project, run, "dead", enabled=True)
    total = sum(len(table_rows) for run in runs for table_rows in load_tables(database, run, rows.REMOVED).values())
    with database.transaction() as tx:
        assert rows.mark_runs(tx, project.id, NOW, NOW, 10) == 3
    removed, left = 0, True
    while left:
        with database.transaction() as tx:
            count, left = rows.delete_details(tx, limit)
        assert count <= limit
        removed += count
    assert removed == total
    assert all(has_no_details(database, run) for run in runs)
    assert all(load_tables(database, run, (tables.run_deletions,)) == {"run_deletions": []} for run in runs)


def test_interrupted_pruning_is_continued(database: Database) -> None:
    """Runs are marked first, so a pass that was interrupted anywhere is completed by the next."""
    project = set_up_project_with_retention(database)
    runs = [add_ended_run(project, 100 + number) for number in range(3)]
    all_tables = [load_tables(database, run, rows.REMOVED) for run in runs]
    passes = 0
    while not all(has_no_details(database, run) for run in runs):
        result = retention.prune_runs(database, NOW, rows=17, pause=lambda _: True)
        assert result.rows <= 17
        for run, all_rows in zip(runs, all_tables, strict=True):
            assert is_marked_pruned(project, run) or load_tables(database, run, rows.REMOVED) == all_rows
        passes += 1
        assert passes < 50
    assert passes > 5
    assert retention.prune_runs(database, NOW) == PruneResult()


def test_pruned_run_is_refused(embedded_database: Database) -> None:
    """The error says when the run was pruned and what to do instead."""
    project = set_up_project_with_retention(embedded_database)
    run = add_ended_run(project, 100)
    retention.prune_runs(embedded_database, NOW, rows=FEW_ROWS)
    with pytest.raises(Conflict, match=r"pruned at 2026-06-01.*open a run under another name"):
        project.post_observations(run, evals(0.5, start=1000))


def test_pruned_runs_and_rows_are_counted(embedded_database: Database) -> None:
    """The counters equal what the pass reports."""
    add_ended_run(set_up_project_with_retention(embedded_database), 100)
    service_metrics = ServiceMetrics()
    result = retention.prune_runs(embedded_database, NOW, rows=FEW_ROWS, service_metrics=service_metrics)
    read_sample = service_metrics.registry.get_sample_value
    assert read_sample("evalstop_pruned_runs_total") == sum(result.runs.values()) == 1
    assert read_sample("evalstop_pruned_rows_total") == result.rows == 20 * 2 + 3 + 3 + 1 + 1
