"""A run that is opened again after its stop, or during it, is watched as before and can be stopped again."""

from __future__ import annotations

import pytest
from evalstop_service.decisions import commands
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported, Undone
from evalstop_service.store import cases, endpoints, runs
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, lift_stop_limits

MORE = [PostedObservation("eval", 900, 0.1)]


@pytest.fixture
def project(project: ProjectFixture) -> ProjectFixture:
    """A project with a receiver, whose stops are requested at once."""
    lift_stop_limits(project.database)
    with project.database.transaction() as tx:
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=EVERY_EVENT, now=NOW)
    return project


def stop(project: ProjectFixture, run: Run) -> Decision:
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    assert decision.state == DecisionState.REQUESTED
    return decision


def confirm(project: ProjectFixture, decision: Decision) -> DecisionState:
    report = Reported(NOW, DecisionState.CONFIRMED, "receiver", "gone", {})
    return commands.record_report(project.database, project.id, decision.id, report).state


def find_run(project: ProjectFixture, run: Run) -> Run:
    with project.database.reading() as tx:
        found = runs.find_run(tx, project.id, run.id)
    assert found is not None
    return found


def test_a_run_that_was_stopped_is_stopped_again(project: ProjectFixture) -> None:
    """Opened again after its stop was confirmed, a run begins a new attempt, in which its policy decides anew."""
    run = project.open_run("one")
    first = stop(project, run)
    confirm(project, first)
    again = project.open_run("one", resume="must")
    assert (again.id, again.attempt, again.status, again.ended_at) == (run.id, 2, "running", None)
    assert len(project.load_events(run, "run.stop_requested")) == 1, "nothing new was seen yet"
    second = project.post_observations(run, MORE).decision
    assert second is not None
    assert (second.attempt, second.state) == (2, DecisionState.REQUESTED)
    assert second.id != first.id
    assert len(project.load_events(run, "run.stop_requested")) == 2
    with project.database.reading() as tx:
        case = cases.find_case(tx, run.id, 1)
    assert case is not None
    assert case.decision_id == first.id, "what became of the first attempt stays on record"


def test_a_run_that_another_job_goes_on_with_is_not_the_stopped_one(project: ProjectFixture) -> None:
    """Opened by another job while its stop is under way, a run goes on in a new attempt, which the end of the old job
    does not end."""
    run = project.open_run("one", job="slurm:1")
    first = stop(project, run)
    again = project.open_run("one", job="slurm:2", resume="must")
    assert (again.id, again.attempt) == (run.id, 2)
    assert confirm(project, first) == DecisionState.CONFIRMED
    assert find_run(project, run).status == "running"
    second = project.post_observations(run, MORE).decision
    assert second is not None
    assert second.id != first.id


def test_the_job_that_is_being_stopped_stays_in_its_attempt(project: ProjectFixture) -> None:
    """A process of the same job that opens its run while the stop is under way does not take the stop away."""
    run = project.open_run("one", job="slurm:1")
    decision = stop(project, run)
    for resume in (None, "allow"):
        assert project.open_run("one", job="slurm:1", resume=resume).attempt == 1
    confirm(project, decision)
    assert find_run(project, run).status == "stopped"


def test_a_run_that_was_let_go_on_stays_let_go_on(project: ProjectFixture) -> None:
    """A person who took a stop back is not asked again when the job opens its run anew."""
    run = project.open_run("one")
    decision = stop(project, run)
    confirm(project, decision)
    commands.apply_command(project.database, project.id, decision.id, Undone(NOW, "dana", "a known dip"))
    assert project.open_run("one", resume="must").attempt == 1
    project.post_observations(run, MORE)
    assert len(project.load_events(run, "run.stop_requested")) == 1
