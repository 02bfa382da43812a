"""The pointer to the best checkpoint, and the turn of a run that has ended."""

from __future__ import annotations

import pytest
from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported
from evalstop_service.rules.run_results import RawMaximum
from evalstop_service.store import decisions

from tests.service.scenes import (
    NOW,
    Scene,
    evals,
)


def test_pointer_is_committed_with_what_moved_it(scene: Scene) -> None:
    """The best checkpoint moves in the transaction of the eval or the checkpoint that moves it, and that is told."""
    run = scene.open()
    assert scene.post(run, evals(0.5)).run.best_checkpoint is None
    assert scene.take(run, CheckpointSaved(0, "file:///0")).run.best_checkpoint is not None
    assert scene.take(run, CheckpointSaved(1, "file:///1")).run.best_checkpoint == scene.read(run).best_checkpoint
    receipt = scene.post(run, evals(0.6, start=1))
    assert scene.read(run).best_checkpoint == receipt.run.best_checkpoint
    assert receipt.run.best_checkpoint is not None
    assert receipt.run.best_checkpoint.step == 1
    assert len(scene.events(run, "run.best_checkpoint_changed")) == 2


def test_the_best_checkpoint_is_not_the_luckiest(scene: Scene) -> None:
    """One eval far above its neighbors is the raw maximum, and not the best checkpoint; both are shown."""
    run = scene.open()
    hill = [0.1 * min(step, 20) + 0.02 * (-1) ** step for step in range(41)]
    for step in range(41):
        scene.take(run, CheckpointSaved(step, f"file:///{step}"))
    row = scene.post(run, evals(*hill[:5], 9.0, *hill[6:])).run
    assert row.raw_maximum == RawMaximum(5, 9.0)
    assert row.best_checkpoint is not None
    assert row.best_checkpoint.step > 15
    assert row.best_checkpoint.score == hill[row.best_checkpoint.step]
    assert row.best_checkpoint.smoothed == pytest.approx(2.0, abs=0.1)
    assert row.best_checkpoint.smoothed_stderr is not None
    assert row.best_checkpoint.smoothed_stderr > 0


def test_a_smoothed_score_that_moves_is_no_news(scene: Scene) -> None:
    """Another eval changes what is believed of the best checkpoint, and no event is sent while it is the same one."""
    run = scene.open()
    scene.take(run, CheckpointSaved(1, "file:///1"))
    before = scene.post(run, evals(0.5, 0.6, 0.4, 0.5)).run.best_checkpoint
    after = scene.post(run, evals(0.2, 0.6, 0.3, start=4)).run.best_checkpoint
    assert before is not None
    assert after is not None
    assert before.smoothed != after.smoothed
    assert len(scene.events(run, "run.best_checkpoint_changed")) == 1


HILL = evals(*(1 - abs(step - 12) / 12 + 0.01 * (-1) ** step for step in range(25)))
"""Gold rises to step 12 and falls as far."""


def test_an_ended_run_tells_its_turn(scene: Scene) -> None:
    """When a run ends, all of its evals tell where gold turned; not before, and no longer once it goes on."""
    run = scene.open()
    assert scene.post(run, HILL).run.turn is None
    ended = commands.finish_run(scene.database, scene.project_id, run.id, "completed", NOW)
    assert ended.turn == scene.read(run).turn
    assert ended.turn is not None
    assert abs(ended.turn.step - 12) <= 1
    assert ended.turn.low_step <= 12 <= ended.turn.high_step
    assert ended.turn.gain == pytest.approx(1.0, abs=0.1)
    assert ended.turn.drop == pytest.approx(1.0, abs=0.1)
    assert scene.take(run, Resumed(20)).run.turn is None


def test_a_run_without_a_fall_has_no_turn(scene: Scene) -> None:
    """Of a run whose gold only rose, and of one without gold, no turn is told."""
    rising, blind = scene.open(), scene.open(metrics={"kl": {"role": "kl", "direction": "minimize"}})
    scene.post(rising, HILL[:13])
    for run in (rising, blind):
        assert commands.finish_run(scene.database, scene.project_id, run.id, "completed", NOW).turn is None


def test_late_evals_move_the_turn_of_an_ended_run(scene: Scene) -> None:
    """What arrives after the end counts as it would have before."""
    late, whole = scene.open(), scene.open()
    scene.post(whole, HILL)
    scene.post(late, HILL[:13])
    for run in (late, whole):
        commands.finish_run(scene.database, scene.project_id, run.id, "failed", NOW)
    scene.post(late, HILL[13:])
    assert scene.read(late).turn == scene.read(whole).turn
    assert scene.read(late).turn is not None


def test_a_confirmed_stop_records_the_turn(scene: Scene) -> None:
    """When the job is confirmed to be gone, the turn goes into the run and into the record of the decision."""
    run = scene.open(mode="enforce")
    decision = scene.post(run, HILL).decision
    assert decision is not None
    said = Reported(NOW, DecisionState.CONFIRMED, "a receiver", "gone", {"exit_status": 0})
    commands.record_report(scene.database, scene.project_id, decision.id, said)
    turn = scene.read(run).turn
    assert turn is not None
    with scene.database.reading() as tx:
        change = decisions.list_changes(tx, decision)[-1]
    assert change.details == {"exit_status": 0, "turn_step": turn.step}


def test_a_checkpoint_does_not_move(scene: Scene) -> None:
    """The same checkpoint again changes nothing; another place for the same step is refused."""
    run = scene.open()
    assert scene.take(run, CheckpointSaved(0, "file:///0")).created
    assert not scene.take(run, CheckpointSaved(0, "file:///0")).created
    with pytest.raises(Conflict, match="file:///0"):
        scene.take(run, CheckpointSaved(0, "file:///1"))
