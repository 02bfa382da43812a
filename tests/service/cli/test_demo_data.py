"""The demo project with example runs."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_detectors import POLICIES
from evalstop_service.cli import demo_data, demo_runs
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import figures
from evalstop_service.store import audit, cases, projects, tables
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Database
from evalstop_service.web.pages.overview import says_enough

from tests.fixtures.projects import create_project
from tests.service.project_fixture import NOW, ProjectFixture


@pytest.mark.nightly
@pytest.mark.slow
def test_demo_data_is_added_once_and_consistent(embedded_database: Database) -> None:
    """There are runs of every kind, and a case for each ended run only; a second call adds nothing.

    Only a policy of the project has a rollout stage: the shipped ones stop as in a new project.
    """
    progress: list[tuple[int, int]] = []
    count = demo_data.fill(embedded_database, "demo", NOW, lambda *done: progress.append(done), most=24)
    runs, cases, decisions = tables.runs.c, tables.cases.c, tables.decisions.c
    with embedded_database.reading() as tx:
        ended = set(tx.execute(sa.select(runs.id).where(runs.ended_at.is_not(None))).scalars())
        run_rows = tx.execute(sa.select(runs.status, runs.created_at, runs.updated_at, runs.ended_at)).all()
        assert set(tx.execute(sa.select(cases.run_id)).scalars()) == ended
        states = set(tx.execute(sa.select(decisions.state)).scalars())
        outcomes = set(tx.execute(sa.select(tables.outcomes.c.outcome)).scalars())
        health_states = set(tx.execute(sa.select(tables.run_health.c.state)).scalars())
        staged = set(tx.execute(sa.select(tables.rollout_stages.c.policy_name)).scalars())
    assert len(run_rows) == count
    assert {row.status for row in run_rows} >= {"running", "completed", "stopped", "lost"}
    assert all(NOW - timedelta(days=61) < row.created_at <= row.updated_at <= NOW for row in run_rows)
    assert states >= {"shadow", "confirmed"}
    assert states & {"pending", "on_hold"}  # one of them may be held out at random
    assert outcomes == {"right", "wrong", "unknown"}
    assert "stale" in health_states
    assert len(staged) == 1
    assert not staged & set(POLICIES)
    assert progress[-1][0] == progress[-1][1]
    assert demo_data.fill(embedded_database, "demo", NOW, most=24) is None


def test_trial_policy_is_good_at_first() -> None:
    """In the first month it stops only runs that have turned, afterwards only healthy ones."""
    stories = demo_runs.choose_stories(random.Random(demo_data.SEED), NOW, None)
    good: list[tuple[bool, bool, bool | None]] = []
    bad: list[tuple[bool, bool, bool | None]] = []
    for story in (story for story in stories if story.policy == demo_runs.TRIED):
        example, stop = story.example, story.example.stops_at(demo_runs.tried_policy())
        right = stop is not None and example.peak_step is not None and example.steps[stop] >= example.peak_step
        days = (story.begins_at - NOW) / timedelta(days=1) + demo_runs.DAYS
        (good if days < demo_runs.GOOD_DAYS[1] else bad).append((stop is not None, right, example.turned))
    assert len(good) > 30
    assert set(good) == {(True, True, True), (False, False, False)}
    assert len(bad) > 25
    assert set(bad) == {(True, False, False)}


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_one_policy_is_trusted_and_another_is_demoted(embedded_database: Database) -> None:
    """`default` is almost always right; `three-declines` is promoted by a person and demoted by the service."""
    demo_data.fill(embedded_database, "demo", NOW)
    with embedded_database.reading() as tx:
        project = projects.find_project_by_name(tx, "demo")
        assert project is not None
        moves = audit.list_entries(tx, project.id, action="rollout_stage.moved", limit=10)
        counts = cases.count_cases(tx, project.id, CaseFilter(policy="default"), ("policy",))
    assert [(move.details["to"], move.actor) for move in moves] == [("shadow", "evalstop"), ("canary", "dana")]
    (default,) = figures.compute_figures(counts, ())
    assert default.precision is not None
    assert default.precision.value is not None
    assert default.precision.value > 0.95
    assert says_enough(default.precision)  # the overview shows a figure


@pytest.mark.nightly
@pytest.mark.slow
def test_interrupted_demo_data_is_reported(embedded_database: Database) -> None:
    """After an interruption, as by Ctrl-C, the second call says so and adds nothing."""

    def interrupt(done: int, of: int) -> None:
        if done > of / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_data.fill(embedded_database, "demo", NOW, interrupt, most=20)
    with embedded_database.reading() as tx:
        before = tx.execute(sa.select(sa.func.count()).select_from(tables.runs)).scalar_one()
    with pytest.raises(Conflict, match=r"was interrupted.*--project NAME"):
        demo_data.fill(embedded_database, "demo", NOW, most=20)
    with embedded_database.reading() as tx:
        assert tx.execute(sa.select(sa.func.count()).select_from(tables.runs)).scalar_one() == before > 0


def test_demo_data_is_not_added_to_other_runs(embedded_database: Database) -> None:
    """Examples are not added to a project that has other runs."""
    project = create_project(embedded_database, "mine", "shadow", 0.0, NOW)
    ProjectFixture(embedded_database, project.id).open_run("ppo")
    with pytest.raises(Conflict, match="already has runs"):
        demo_data.fill(embedded_database, "mine", NOW)
