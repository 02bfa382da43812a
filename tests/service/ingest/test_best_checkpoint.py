"""The best checkpoint of a run, and the turn of a run that has ended."""

from __future__ import annotations

import pytest
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.store import decisions

from tests.service.project_fixture import (
    ProjectFixture,
    evals,
)


def test_best_checkpoint_is_committed_with_its_cause(project: ProjectFixture) -> None:
    """The best checkpoint changes, with an event, in the transaction of the eval or checkpoint that changes it."""
    run = project.open_run()
    assert project.post_observations(run, evals(0.5)).run.best_checkpoint is None
    assert project.submit(run, CheckpointSaved(0, "file:///0")).run.best_checkpoint is not None
    assert (
        project.submit(run, CheckpointSaved(1, "file:///1")).run.best_checkpoint
        == project.load_run(run).best_checkpoint
    )
    receipt = project.post_observations(run, evals(0.6, start=1))
    assert project.load_run(run).best_checkpoint == receipt.run.best_checkpoint
    assert receipt.run.best_checkpoint is not None
    assert receipt.run.best_checkpoint.step == 1
    assert len(project.load_events(run, "run.best_checkpoint_changed")) == 2


def test_changed_smoothed_score_sends_no_event(project: ProjectFixture) -> None:
    """Another eval changes the smoothed score; no event is sent while the best checkpoint is the same."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    before = project.post_observations(run, evals(0.5, 0.6, 0.4, 0.5)).run.best_checkpoint
    after = project.post_observations(run, evals(0.2, 0.6, 0.3, start=4)).run.best_checkpoint
    assert before is not None
    assert after is not None
    assert before.smoothed != after.smoothed
    assert len(project.load_events(run, "run.best_checkpoint_changed")) == 1


HILL = evals(*(1 - abs(step - 12) / 12 + 0.01 * (-1) ** step for step in range(25)))
"""The eval rises to step 12 and falls as far."""


def test_ended_run_has_a_turn(project: ProjectFixture) -> None:
    """An ended run has the turn estimated from all of its evals; a resumed one has none."""
    run = project.open_run()
    assert project.post_observations(run, HILL).run.turn is None
    ended = project.finish_run(run)
    assert ended.turn == project.load_run(run).turn
    assert ended.turn is not None
    assert abs(ended.turn.step - 12) <= 1
    assert ended.turn.low_step <= 12 <= ended.turn.high_step
    assert project.submit(run, Resumed(20)).run.turn is None


def test_late_evals_update_the_turn(project: ProjectFixture) -> None:
    """Evals that arrive after the end count as if they had come before."""
    late_run, prompt_run = project.open_run(), project.open_run()
    project.post_observations(prompt_run, HILL)
    project.post_observations(late_run, HILL[:13])
    for run in (late_run, prompt_run):
        project.finish_run(run, "failed")
    project.post_observations(late_run, HILL[13:])
    assert project.load_run(late_run).turn == project.load_run(prompt_run).turn
    assert project.load_run(late_run).turn is not None


def test_confirmed_stop_records_the_turn(project: ProjectFixture) -> None:
    """When a stop is confirmed, the turn is stored in the run and in the decision's history."""
    run = project.open_run(mode="enforce")
    project.post_observations(run, HILL)
    decision = project.load_decision(run)
    project.record_report(decision, DecisionState.CONFIRMED)
    turn = project.load_run(run).turn
    assert turn is not None
    with project.database.reading() as tx:
        change = decisions.list_changes(tx, decision)[-1]
    assert change.details == {"exit_status": -15, "turn_step": turn.step}


def test_checkpoint_cannot_change_its_uri(project: ProjectFixture) -> None:
    """The same checkpoint again changes nothing; another URI for its step is refused."""
    run = project.open_run()
    assert project.submit(run, CheckpointSaved(0, "file:///0")).created
    assert not project.submit(run, CheckpointSaved(0, "file:///0")).created
    with pytest.raises(Conflict, match="file:///0"):
        project.submit(run, CheckpointSaved(0, "file:///1"))
