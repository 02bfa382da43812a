"""A run that is reopened during or after its stop is watched as before and can be stopped again."""

from __future__ import annotations

import pytest
from evalstop_service.domain.decision_commands import Undone
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import NOW, ProjectFixture, lift_stop_limits

LATER_EVAL = [PostedObservation("eval", 900, 0.1)]


@pytest.fixture
def project(project: ProjectFixture) -> ProjectFixture:
    """A project with a receiver, whose stops are requested at once."""
    lift_stop_limits(project.database)
    project.add_endpoint()
    return project


def test_stopped_run_can_be_stopped_again(project: ProjectFixture) -> None:
    """Reopened after its stop was confirmed, a run starts a new attempt, which can be stopped again."""
    run, first = project.open_declining_run("one")
    project.record_report(first, DecisionState.CONFIRMED)
    again = project.open_run("one", resume="must")
    assert (again.id, again.attempt, again.status, again.ended_at) == (run.id, 2, "running", None)
    assert len(project.load_events(run, "run.stop_requested")) == 1, "no new observation yet"
    second = project.post_observations(run, LATER_EVAL).decision
    assert second is not None
    assert (second.attempt, second.state) == (2, DecisionState.REQUESTED)
    assert second.id != first.id
    assert len(project.load_events(run, "run.stop_requested")) == 2
    case = project.load_case(run)
    assert case.decision_id == first.id, "the case of the first attempt keeps its decision"


def test_run_continued_by_another_job_stays_running(project: ProjectFixture) -> None:
    """Reopened by another job while a stop is pending, a run starts an attempt that the old job's end leaves alone."""
    run, first = project.open_declining_run("one", job="slurm:1")
    again = project.open_run("one", job="slurm:2", resume="must")
    assert (again.id, again.attempt) == (run.id, 2)
    assert project.record_report(first, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert project.load_run(run).status == "running"
    second = project.post_observations(run, LATER_EVAL).decision
    assert second is not None
    assert second.id != first.id


def test_reopening_in_the_same_job_keeps_the_stop(project: ProjectFixture) -> None:
    """A process of the same job that reopens the run during its stop stays in the attempt."""
    run, decision = project.open_declining_run("one", job="slurm:1")
    for resume in (None, "allow"):
        assert project.open_run("one", job="slurm:1", resume=resume).attempt == 1
    project.record_report(decision, DecisionState.CONFIRMED)
    assert project.load_run(run).status == "stopped"


def test_undone_stop_is_not_requested_again(project: ProjectFixture) -> None:
    """After a person undid a stop, reopening the run in a new job requests no new one."""
    run, decision = project.open_declining_run("one")
    project.record_report(decision, DecisionState.CONFIRMED)
    project.apply_command(decision, Undone(NOW, "dana", "a known dip"))
    assert project.open_run("one", resume="must").attempt == 1
    project.post_observations(run, LATER_EVAL)
    assert len(project.load_events(run, "run.stop_requested")) == 1
