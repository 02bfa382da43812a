"""Attempts: resuming from a checkpoint, and reopening a run during or after its stop."""

from __future__ import annotations

from typing import Any

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.domain.decision_commands import Undone
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.store import tables
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.queue import leases
from evalstop_service.store.runs import Run

from tests.service.project_fixture import (
    NOW,
    ONE_HOUR_LATER,
    ProjectFixture,
    evals,
    lift_stop_limits,
    load_stop_delivery_states,
)


def test_resume_supersedes_later_observations(project: ProjectFixture) -> None:
    """Observations and checkpoints past the resumed step stay on record, do not count, and can be sent again."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    project.submit(run, CheckpointSaved(3, "file:///3"))
    project.post_observations(run, evals(0.5, 0.6, 0.4, 0.9))
    assert read_best_checkpoint(project.load_run(run)) == {
        "step": 3,
        "uri": "file:///3",
        "score": 0.9,
        "chosen_by": "smoothed_maximum",
    }
    receipt = project.submit(run, Resumed(1))
    assert (receipt.superseded, receipt.run.attempt, receipt.run.last_step) == (2, 2, 1)
    assert read_best_checkpoint(receipt.run) == {
        "step": 1,
        "uri": "file:///1",
        "score": 0.6,
        "chosen_by": "smoothed_maximum",
    }
    assert project.post_observations(run, evals(0.7, 0.8, start=2)).accepted == 2
    assert project.submit(run, CheckpointSaved(3, "file:///elsewhere")).created
    stored = {(row["step"], row["superseded_by"]): row["value"] for row in project.load_rows(tables.observations, run)}
    assert stored == {(0, 0): 0.5, (1, 0): 0.6, (2, 2): 0.4, (3, 2): 0.9, (2, 0): 0.7, (3, 0): 0.8}


def read_best_checkpoint(run: Run) -> dict[str, Any] | None:
    best = run.best_checkpoint
    return {key: getattr(best, key) for key in ("step", "uri", "score", "chosen_by")} if best else None


def test_repeated_resume_changes_nothing(project: ProjectFixture) -> None:
    """The same resume again changes nothing; after new messages it starts another attempt."""
    run = project.open_run()
    project.post_observations(run, evals(0.5, 0.6, 0.4))
    assert project.submit(run, Resumed(1)).run.attempt == 2
    assert project.submit(run, Resumed(1)).run.attempt == 2
    assert project.submit(run, Resumed(0)).run.attempt == 3
    project.submit(run, CheckpointSaved(2, "file:///2"))
    assert project.submit(run, Resumed(0)).run.attempt == 4
    project.post_observations(run, evals(0.1, start=5))
    assert project.submit(run, Resumed(0)).run.attempt == 5


def test_resume_at_step_0_of_a_new_run_changes_nothing(project: ProjectFixture) -> None:
    """A trainer that cannot know whether it was started before may say so at each start."""
    run = project.open_run()
    assert [project.submit(run, Resumed(0)).run.attempt for _ in range(2)] == [1, 1]
    project.post_observations(run, evals(0.5, start=1))
    assert project.submit(run, Resumed(0)).run.attempt == 2
    assert project.load_run(run).last_step is None


def test_resume_reopens_an_ended_run(project: ProjectFixture) -> None:
    """A job that failed right after its resume, and resumes from the same step again, is watched again."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    project.submit(run, Resumed(0))
    project.finish_run(run, "failed")
    receipt = project.submit(run, Resumed(0))
    assert (receipt.run.status, receipt.run.ended_at) == ("running", None)
    assert project.post_observations(run, evals(0.4, 0.3, 0.2, start=1)).decision is not None


def test_resume_vetoes_a_stop_in_its_veto_window(veto_project: ProjectFixture) -> None:
    """A stop still in its veto window does not apply to the attempt that the trainer starts meanwhile."""
    run, _ = veto_project.open_declining_run()
    veto_project.submit(run, Resumed(1))
    decision = veto_project.load_decision(run)
    assert decision.state == DecisionState.VETOED
    assert (veto_project.end_windows(ONE_HOUR_LATER), load_stop_delivery_states(veto_project)) == (0, [])


def test_resume_makes_an_undelivered_stop_moot(project: ProjectFixture) -> None:
    """A stop that no receiver got is moot for the ended attempt; one that a worker claimed stays requested."""
    project.add_endpoint(["run.stop_requested"])
    run, _ = project.open_declining_run()
    project.submit(run, Resumed(1))
    assert (project.load_decision(run, 1).state, load_stop_delivery_states(project)) == (
        DecisionState.MOOT,
        ["cancelled"],
    )
    assert project.post_observations(run, evals(0.8, 0.7, 0.6, start=2)).decision is not None
    with project.database.transaction() as tx:
        assert len(leases.claim_deliveries(tx, utc_now(), 60.0, 10, 10)) == 1
    project.submit(run, Resumed(1))
    assert (project.load_decision(run, 2).state, load_stop_delivery_states(project)) == (
        DecisionState.REQUESTED,
        ["cancelled"] * 2,
    )


LATER_EVAL = [PostedObservation("eval", 900, 0.1)]


@pytest.fixture
def stopping_project(project: ProjectFixture) -> ProjectFixture:
    """A project with a receiver, whose stops are requested at once."""
    lift_stop_limits(project.database)
    project.add_endpoint()
    return project


def test_stopped_run_can_be_stopped_again(stopping_project: ProjectFixture) -> None:
    """Reopened after its stop was confirmed, a run starts a new attempt, which can be stopped again."""
    run, first = stopping_project.open_declining_run("one")
    stopping_project.record_report(first, DecisionState.CONFIRMED)
    again = stopping_project.open_run("one", resume="must")
    assert (again.id, again.attempt, again.status, again.ended_at) == (run.id, 2, "running", None)
    assert len(stopping_project.load_events(run, "run.stop_requested")) == 1, "no new observation yet"
    second = stopping_project.post_observations(run, LATER_EVAL).decision
    assert second is not None
    assert (second.attempt, second.state) == (2, DecisionState.REQUESTED)
    assert second.id != first.id
    assert len(stopping_project.load_events(run, "run.stop_requested")) == 2
    case = stopping_project.load_case(run)
    assert case.decision_id == first.id, "the case of the first attempt keeps its decision"


def test_run_continued_by_another_job_stays_running(stopping_project: ProjectFixture) -> None:
    """Reopened by another job while a stop is pending, a run starts an attempt that the old job's end leaves alone."""
    run, first = stopping_project.open_declining_run("one", job="slurm:1")
    again = stopping_project.open_run("one", job="slurm:2", resume="must")
    assert (again.id, again.attempt) == (run.id, 2)
    assert stopping_project.record_report(first, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert stopping_project.load_run(run).status == "running"
    second = stopping_project.post_observations(run, LATER_EVAL).decision
    assert second is not None
    assert second.id != first.id


def test_reopening_in_the_same_job_keeps_the_stop(stopping_project: ProjectFixture) -> None:
    """A process of the same job that reopens the run during its stop stays in the attempt."""
    run, decision = stopping_project.open_declining_run("one", job="slurm:1")
    for resume in (None, "allow"):
        assert stopping_project.open_run("one", job="slurm:1", resume=resume).attempt == 1
    stopping_project.record_report(decision, DecisionState.CONFIRMED)
    assert stopping_project.load_run(run).status == "stopped"


def test_undone_stop_is_not_requested_again(stopping_project: ProjectFixture) -> None:
    """After a person undid a stop, reopening the run in a new job requests no new one."""
    run, decision = stopping_project.open_declining_run("one")
    stopping_project.record_report(decision, DecisionState.CONFIRMED)
    stopping_project.apply_command(decision, Undone(NOW, "dana", "a known dip"))
    assert stopping_project.open_run("one", resume="must").attempt == 1
    stopping_project.post_observations(run, LATER_EVAL)
    assert len(stopping_project.load_events(run, "run.stop_requested")) == 1
