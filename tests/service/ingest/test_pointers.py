"""The pointer to the best checkpoint, and the turn of a run that has ended."""

from __future__ import annotations

import pytest
from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported
from evalstop_service.rules.run_results import RawMaximum
from evalstop_service.store import decisions

from tests.service.project_fixture import (
    NOW,
    ProjectFixture,
    evals,
)


def test_pointer_is_committed_with_what_moved_it(project: ProjectFixture) -> None:
    """The best checkpoint moves in the transaction of the eval or the checkpoint that moves it, and that is told."""
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


def test_the_best_checkpoint_is_not_the_luckiest(project: ProjectFixture) -> None:
    """One eval far above its neighbors is the raw maximum, and not the best checkpoint; both are shown."""
    run = project.open_run()
    hill = [0.1 * min(step, 20) + 0.02 * (-1) ** step for step in range(41)]
    for step in range(41):
        project.submit(run, CheckpointSaved(step, f"file:///{step}"))
    row = project.post_observations(run, evals(*hill[:5], 9.0, *hill[6:])).run
    assert row.raw_maximum == RawMaximum(5, 9.0)
    assert row.best_checkpoint is not None
    assert row.best_checkpoint.step > 15
    assert row.best_checkpoint.score == hill[row.best_checkpoint.step]
    assert row.best_checkpoint.smoothed == pytest.approx(2.0, abs=0.1)
    assert row.best_checkpoint.smoothed_stderr is not None
    assert row.best_checkpoint.smoothed_stderr > 0


def test_a_smoothed_score_that_moves_is_no_news(project: ProjectFixture) -> None:
    """Another eval changes what is believed of the best checkpoint, and no event is sent while it is the same one."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    before = project.post_observations(run, evals(0.5, 0.6, 0.4, 0.5)).run.best_checkpoint
    after = project.post_observations(run, evals(0.2, 0.6, 0.3, start=4)).run.best_checkpoint
    assert before is not None
    assert after is not None
    assert before.smoothed != after.smoothed
    assert len(project.load_events(run, "run.best_checkpoint_changed")) == 1


HILL = evals(*(1 - abs(step - 12) / 12 + 0.01 * (-1) ** step for step in range(25)))
"""Gold rises to step 12 and falls as far."""


def test_an_ended_run_tells_its_turn(project: ProjectFixture) -> None:
    """When a run ends, all of its evals tell where gold turned; not before, and no longer once it goes on."""
    run = project.open_run()
    assert project.post_observations(run, HILL).run.turn is None
    ended = commands.finish_run(project.database, project.id, run.id, "completed", NOW)
    assert ended.turn == project.load_run(run).turn
    assert ended.turn is not None
    assert abs(ended.turn.step - 12) <= 1
    assert ended.turn.low_step <= 12 <= ended.turn.high_step
    assert ended.turn.gain == pytest.approx(1.0, abs=0.1)
    assert ended.turn.drop == pytest.approx(1.0, abs=0.1)
    assert project.submit(run, Resumed(20)).run.turn is None


def test_a_run_without_a_fall_has_no_turn(project: ProjectFixture) -> None:
    """Of a run whose gold only rose, and of one without gold, no turn is told."""
    rising, blind = project.open_run(), project.open_run(metrics={"kl": {"role": "kl", "direction": "minimize"}})
    project.post_observations(rising, HILL[:13])
    for run in (rising, blind):
        assert commands.finish_run(project.database, project.id, run.id, "completed", NOW).turn is None


def test_late_evals_move_the_turn_of_an_ended_run(project: ProjectFixture) -> None:
    """What arrives after the end counts as it would have before."""
    late, whole = project.open_run(), project.open_run()
    project.post_observations(whole, HILL)
    project.post_observations(late, HILL[:13])
    for run in (late, whole):
        commands.finish_run(project.database, project.id, run.id, "failed", NOW)
    project.post_observations(late, HILL[13:])
    assert project.load_run(late).turn == project.load_run(whole).turn
    assert project.load_run(late).turn is not None


def test_a_confirmed_stop_records_the_turn(project: ProjectFixture) -> None:
    """When the job is confirmed to be gone, the turn goes into the run and into the record of the decision."""
    run = project.open_run(mode="enforce")
    decision = project.post_observations(run, HILL).decision
    assert decision is not None
    said = Reported(NOW, DecisionState.CONFIRMED, "a receiver", "gone", {"exit_status": 0})
    commands.record_report(project.database, project.id, decision.id, said)
    turn = project.load_run(run).turn
    assert turn is not None
    with project.database.reading() as tx:
        change = decisions.list_changes(tx, decision)[-1]
    assert change.details == {"exit_status": 0, "turn_step": turn.step}


def test_a_checkpoint_does_not_move(project: ProjectFixture) -> None:
    """The same checkpoint again changes nothing; another place for the same step is refused."""
    run = project.open_run()
    assert project.submit(run, CheckpointSaved(0, "file:///0")).created
    assert not project.submit(run, CheckpointSaved(0, "file:///0")).created
    with pytest.raises(Conflict, match="file:///0"):
        project.submit(run, CheckpointSaved(0, "file:///1"))
