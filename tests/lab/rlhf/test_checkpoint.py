"""Checkpoints are complete and atomic, and other files are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evalstop_lab.errors import CheckpointUnreadable
from evalstop_lab.rlhf import PRESETS, Trainer, hasten_run
from evalstop_lab.rlhf.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from evalstop_lab.rlhf.policy import Policy

CONFIG = replace(hasten_run(PRESETS["overoptimizes"], 20), steps=40)


def build_checkpoint(steps: int = 25) -> Checkpoint:
    trainer = Trainer(CONFIG)
    for _ in range(steps):
        trainer.train_step()
    return Checkpoint("a run", CONFIG, trainer.state)


def test_run_resumed_from_a_file_is_bitwise_equal(tmp_path: Path) -> None:
    """The rest of the log is the same as without an interruption."""
    uninterrupted = [logged for logged in Trainer(CONFIG).evals() if logged.step > 25]
    loaded = load_checkpoint(save_checkpoint(tmp_path, build_checkpoint(25)))
    assert (loaded.run_name, loaded.config, loaded.state.step) == ("a run", CONFIG, 25)
    assert list(Trainer(loaded.config, loaded.state).evals()) == uninterrupted


def test_failed_save_keeps_only_the_earlier_file(tmp_path: Path) -> None:
    """If a save fails, the earlier checkpoint of that step is unchanged and no other file remains."""
    good = build_checkpoint(1)
    path = save_checkpoint(tmp_path, good)
    before = path.read_bytes()
    unwritable = np.array([lambda: None], dtype=object)
    broken = replace(good, state=replace(good.state, policy=Policy(CONFIG.task, unwritable)))
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        save_checkpoint(tmp_path, broken)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip"])
def test_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    """The message has the name of the file and the expected kind of file."""
    file = tmp_path / "step-000001.npz"
    file.write_bytes(content)
    with pytest.raises(CheckpointUnreadable, match=r"evalstop-lab train.*step-000001\.npz"):
        load_checkpoint(file)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A file is refused, however much of its end is missing."""
    path = save_checkpoint(tmp_path, build_checkpoint(1))
    content = path.read_bytes()
    for length in np.linspace(0, len(content) - 1, 40, dtype=int):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointUnreadable):
            load_checkpoint(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """The message says that the file does not exist."""
    with pytest.raises(CheckpointUnreadable, match="No such file"):
        load_checkpoint(tmp_path / "nowhere.npz")
