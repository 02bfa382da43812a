"""What holds a pending stop holds one that was requested and that nobody was handed; then it goes out by two steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from evalstop_service.clock import rfc3339, utc_now
from evalstop_service.decisions import commands, deadlines, pause
from evalstop_service.decisions.veto_windows import VetoListener
from evalstop_service.domain.decision_commands import Released, Vetoed
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.times import parse_stop_hours
from evalstop_service.errors import Conflict
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases
from evalstop_service.store.runs import Run

from tests.service.project_fixture import DECLINING_EVALS, ProjectFixture, set_up_project

JOB = {"slurm_job_id": "7", "slurm_cluster": "alpha"}
STOPS = ["run.stop_requested"]
REQUESTED, ON_HOLD, PENDING = DecisionState.REQUESTED, DecisionState.ON_HOLD, DecisionState.PENDING


def set_up(database: Database, window_seconds: float = 0.0) -> ProjectFixture:
    project = replace(set_up_project(database, veto_window_seconds=window_seconds), now=utc_now())
    project.change_settings(stops_share=None, stops_per_hour=None)
    project.add_endpoint(STOPS)
    return project


def open_two_declining_runs(project: ProjectFixture) -> list[Run]:
    """Two runs in one job whose stops are requested."""
    runs = [project.open_run(name, labels=JOB) for name in ("a", "b")]
    for run in runs:
        project.post_observations(run, DECLINING_EVALS)
    deadlines.process_overdue(project.database, project.now + timedelta(minutes=2))
    return runs


def claim(project: ProjectFixture, now: datetime | None = None) -> int:
    with project.database.transaction() as tx:
        return len(leases.claim_deliveries(tx, now or utc_now(), 0.0, 10, 10))


def check(project: ProjectFixture) -> None:
    """One round of the periodic job that takes stops back."""
    deadlines.create_job(project.database, utc_now).do(lambda _: False)


def veto(project: ProjectFixture, run: Run) -> None:
    decision = project.load_decision(run)
    project.apply_command(decision, Vetoed(utc_now(), "dana", "a known dip"))


def read_states(project: ProjectFixture, *runs: Run) -> list[DecisionState]:
    return [project.load_decision(run).state for run in runs]


def test_stop_is_handed_over_once_all_listeners_wrote_after_it_was_asked_for(database: Database) -> None:
    """With a veto window, a claim asks for the stop; the next one gets it, once vetoes sent before were dealt with."""
    project = set_up(database, 60.0)
    listener = VetoListener(database, utc_now)
    asyncio.run(listener.listen_once())
    run, _ = project.open_declining_run()
    with database.transaction() as tx:
        tx.execute(tables.decisions.update().values(due_at=utc_now()))
    project.end_windows(utc_now())
    assert (read_states(project, run), claim(project)) == ([REQUESTED], 0)
    asyncio.run(listener.listen_once())
    decision = project.load_decision(run)
    assert decision.handed_over_to == "the endpoint at 127.0.0.1"
    assert claim(project, utc_now() + timedelta(seconds=1)) == 1
    with pytest.raises(Conflict, match="handed over to the endpoint"):
        veto(project, run)


def test_veto_refused_after_the_window_is_heard_when_it_is_repeated(database: Database) -> None:
    """A requested stop that nobody was handed gets another window, for the trainer too, and its request is canceled."""
    project = set_up(database, 60.0)
    listener = VetoListener(database, utc_now)
    asyncio.run(listener.listen_once())
    run, _ = project.open_declining_run()
    with database.transaction() as tx:
        tx.execute(tables.decisions.update().values(due_at=utc_now()))
    project.end_windows(utc_now())
    assert not commands.tell_trainer_of(database, utc_now, run)
    listener.report_failure(project.id)
    asyncio.run(listener.listen_once())
    assert read_states(project, run) == [PENDING]
    assert not commands.tell_trainer_of(database, utc_now, run)
    assert claim(project, utc_now() + timedelta(seconds=1)) == 0
    veto(project, run)


def hold_by_pause(project: ProjectFixture) -> None:
    pause.pause_project(project.database, project.id, "dana", "maintenance", utc_now())


def hold_by_hours(project: ProjectFixture) -> None:
    day = (utc_now() + timedelta(days=3)).strftime("%a").lower()
    project.change_settings(stop_hours=parse_stop_hours(f"{day} 09:00-10:00 UTC"))


@pytest.mark.parametrize(("hold", "state"), [(hold_by_pause, ON_HOLD), (hold_by_hours, PENDING)])
def test_requested_stop_waits_for_pauses_and_hours(
    database: Database, hold: Callable[[ProjectFixture], None], state: DecisionState
) -> None:
    """A receiver that comes when stops may not go out gets none, and the decision says what it waits for."""
    project = set_up(database)
    run, _ = project.open_declining_run()
    assert read_states(project, run) == [REQUESTED]
    hold(project)
    assert claim(project) == 0
    assert not commands.tell_trainer_of(database, utc_now, run)
    check(project)
    assert read_states(project, run) == [state]


def test_veto_of_one_run_holds_the_stop_of_its_job(database: Database) -> None:
    """A stop of the job would end the vetoed run: nobody gets it."""
    project = set_up(database)
    first, second = open_two_declining_runs(project)
    assert read_states(project, first, second) == [REQUESTED, REQUESTED]
    veto(project, second)
    assert claim(project) == 0
    check(project)
    assert read_states(project, first) == [ON_HOLD]
    assert project.load_decision(first).guard_kinds == ["shared_job"]


def test_run_that_enters_the_job_holds_its_requested_stop(database: Database) -> None:
    """A run that came after the request ends with nobody's stop."""
    project = set_up(database)
    run = project.open_run("a", labels=JOB)
    project.post_observations(run, DECLINING_EVALS)
    project.open_run("b", labels=JOB)
    assert claim(project) == 0
    check(project)
    assert read_states(project, run) == [ON_HOLD]


def test_stop_names_the_part_of_the_job_again_once_others_entered_it(database: Database) -> None:
    """The stop of a step alone in its job said that the job ends; now it says that the step does."""
    project = set_up(database)
    run = project.open_run("a", labels=JOB | {"slurm_step_id": "0"})
    project.post_observations(run, DECLINING_EVALS)
    project.open_run("b", utc_now(), labels=JOB | {"slurm_step_id": "1"})
    assert claim(project) == 0
    check(project)
    assert read_states(project, run) == [PENDING]


def test_requested_stop_that_waits_again_is_announced(database: Database) -> None:
    """Its new window is announced, and a run that enters the job meanwhile does not shorten it."""
    project = set_up(database)
    run = project.open_run("a", labels=JOB | {"slurm_step_id": "0"})
    project.post_observations(run, DECLINING_EVALS)
    hold_by_hours(project)
    check(project)
    due_at = project.load_decision(run).due_at
    (told,) = project.load_events(run, "run.stop_pending")
    assert json.loads(told["body"])["data"]["decision"]["due_at"] == rfc3339(due_at)
    project.open_run("b", utc_now(), labels=JOB | {"slurm_step_id": "1"})
    check(project)
    assert project.load_decision(run).due_at == due_at
    assert len(project.load_rows(tables.decision_changes, run)) == 2


def test_stop_of_a_job_is_handed_over_for_all_its_runs(database: Database) -> None:
    """Whoever got the stop of one run ends the others too, so these can't be vetoed any more."""
    project = set_up(database)
    first, second = open_two_declining_runs(project)
    with database.transaction() as tx:
        assert len(leases.claim_deliveries(tx, utc_now() + timedelta(minutes=3), 60.0, 1, 1)) == 1
    for run in (first, second):
        with pytest.raises(Conflict, match="handed over to the endpoint"):
            veto(project, run)


def test_release_covers_the_runs_that_were_named(database: Database) -> None:
    """A run that enters the job after a person released its stop is one that nobody was asked about."""
    project = set_up(database)
    first, _ = project.open_run("a", labels=JOB), project.open_run("b", labels=JOB)
    project.post_observations(first, DECLINING_EVALS)
    project.apply_command(project.load_decision(first), Released(utc_now(), "dana", "both are lost"))
    assert read_states(project, first) == [REQUESTED]
    project.open_run("c", labels=JOB)
    assert claim(project) == 0
    check(project)
    assert read_states(project, first) == [ON_HOLD]
    assert project.load_decision(first).state_reason == "1 other live run in this job: c"
