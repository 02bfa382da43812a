"""Checkpoints are complete and atomic."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evalstop_lab.rlhf.checkpoint import load_checkpoint, save_checkpoint
from evalstop_lab.rlhf.policy import Policy
from evalstop_lab.rlhf.trainer import PRESETS, State, Trainer, hasten_run

CONFIG = replace(hasten_run(PRESETS["overoptimizes"], 20), steps=40)


def train(steps: int) -> State:
    trainer = Trainer(CONFIG)
    for _ in range(steps):
        trainer.train_step()
    return trainer.state


def test_run_resumed_from_a_file_is_bitwise_equal(tmp_path: Path) -> None:
    """The rest of the log is the same as without an interruption."""
    uninterrupted = [logged for logged in Trainer(CONFIG).evals() if logged.step > 25]
    loaded = load_checkpoint(save_checkpoint(tmp_path, CONFIG, train(25)))
    assert (loaded.config, loaded.state.step) == (CONFIG, 25)
    assert list(Trainer(loaded.config, loaded.state).evals()) == uninterrupted


def test_failed_save_keeps_only_the_earlier_file(tmp_path: Path) -> None:
    """If a save fails, the earlier checkpoint of that step is unchanged and no other file remains."""
    good = train(1)
    path = save_checkpoint(tmp_path, CONFIG, good)
    before = path.read_bytes()
    unwritable = np.array([lambda: None], dtype=object)
    broken = replace(good, policy=Policy(CONFIG.task, unwritable))
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        save_checkpoint(tmp_path, CONFIG, broken)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
