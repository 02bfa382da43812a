"""The demo measures what a stop saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evalstop_lab.rlhf.checkpoint import save_checkpoint
from evalstop_lab.rlhf.demo import continue_training
from evalstop_lab.rlhf.trainer import PRESETS, Trainer, hasten_run
from rich.console import Console


def test_steps_between_the_last_eval_and_the_stop_are_not_saved(tmp_path: Path) -> None:
    """A run that is stopped between two evals continues from the step at which it was stopped."""
    config = replace(hasten_run(PRESETS["overoptimizes"], 20), steps=40)
    trainer = Trainer(config)
    while trainer.state.step < 25:
        trainer.train_step()
        if trainer.state.step in (20, 25):
            save_checkpoint(tmp_path / "checkpoints", config, trainer.state)
    stopped_at, later_evals = continue_training(tmp_path, Console(quiet=True))
    assert stopped_at == 25
    assert [item.step for item in later_evals] == [40]
