"""The demo project with example runs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.cli import demo_data
from evalstop_service.evaluation import figures
from evalstop_service.store import cases, projects, tables
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Database
from evalstop_service.web.pages.overview import is_precise

from tests.fixtures.projects import create_project
from tests.service.project_fixture import NOW, ProjectFixture


@pytest.mark.nightly
@pytest.mark.slow
def test_demo_data_is_added_once_and_consistent(embedded_database: Database) -> None:
    """There are runs of every kind, and a case for each ended run only; a second call adds nothing."""
    count = demo_data.fill(embedded_database, "demo", NOW, most=30)
    runs, cases, decisions = tables.runs.c, tables.cases.c, tables.decisions.c
    with embedded_database.reading() as tx:
        ended = set(tx.execute(sa.select(runs.id).where(runs.ended_at.is_not(None))).scalars())
        run_rows = tx.execute(sa.select(runs.status, runs.created_at, runs.updated_at, runs.ended_at)).all()
        assert set(tx.execute(sa.select(cases.run_id)).scalars()) == ended
        states = set(tx.execute(sa.select(decisions.state)).scalars())
        outcomes = set(tx.execute(sa.select(tables.outcomes.c.outcome)).scalars())
        health_states = set(tx.execute(sa.select(tables.run_health.c.state)).scalars())
    assert len(run_rows) == count == 30
    assert {row.status for row in run_rows} >= {"running", "completed", "lost"}
    assert all(NOW - timedelta(days=61) < row.created_at <= row.updated_at <= NOW for row in run_rows)
    assert "shadow" in states
    assert states & {"confirmed", "held_out"}  # hold-outs are drawn by the run's random id
    assert outcomes >= {"right", "wrong"}
    assert "stale" in health_states
    assert demo_data.fill(embedded_database, "demo", NOW, most=30) == 0


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_shipped_policy_is_almost_always_right(embedded_database: Database) -> None:
    """On all examples `default` shows a precision that the overview shows as a figure; `k_decline`, which observes the
    same runs, often calls a healthy one."""
    demo_data.fill(embedded_database, "demo", NOW)
    with embedded_database.reading() as tx:
        project = projects.find_project_by_name(tx, "demo")
        assert project is not None
        counts = cases.count_cases(tx, project.id, CaseFilter(policy="default"), ("policy",))
        panel = figures.load_figures(tx, project.id, CaseFilter(policy="default"), ("detector",))
    (default,) = figures.compute_figures(counts)
    assert default.precision is not None
    assert default.precision.value is not None
    assert default.precision.value > 0.95
    assert is_precise(default.precision)
    posterior, k_decline = ({group.key[0]: group for group in panel}[name] for name in ("posterior", "k_decline"))
    assert posterior.false_stops.value is not None
    assert k_decline.false_stops.value is not None
    assert k_decline.false_stops.value > 0.3 > posterior.false_stops.value


def test_demo_data_is_not_added_to_other_runs(embedded_database: Database) -> None:
    """Examples are not added to a project that has runs."""
    project = create_project(embedded_database, "mine", "shadow", 0.0, NOW)
    ProjectFixture(embedded_database, project.id).open_run("ppo")
    assert demo_data.fill(embedded_database, "mine", NOW) == 0
