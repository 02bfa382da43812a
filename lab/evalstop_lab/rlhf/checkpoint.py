"""Saves and loads checkpoints: one .npz file each, written atomically."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evalstop_lab.rlhf.policy import Policy, Task
from evalstop_lab.rlhf.trainer import Config, Moments, State


class Checkpoint(NamedTuple):
    """What a run needs to go on."""

    config: Config
    state: State


def save_checkpoint(folder: Path, config: Config, state: State) -> Path:
    """Write a checkpoint atomically to step-NNNNNN.npz in `folder`; return its absolute path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"step-{state.step:06d}.npz"
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            np.savez(
                file,
                config=np.array(json.dumps(asdict(config))),
                step=state.step,
                parameters=state.policy.parameters,
                moments_mean=state.moments.mean,
                moments_square=state.moments.square,
                moments_count=state.moments.count,
            )
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a file of `save_checkpoint`."""
    with np.load(path, allow_pickle=False) as stored:
        fields = json.loads(str(stored["config"]))
        config = Config(**{**fields, "task": Task(**fields["task"])})
        moments = Moments(stored["moments_mean"], stored["moments_square"], int(stored["moments_count"]))
        return Checkpoint(config, State(int(stored["step"]), Policy(config.task, stored["parameters"]), moments))
