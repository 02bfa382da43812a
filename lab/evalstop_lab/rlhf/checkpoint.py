"""Saves and loads checkpoints of the example: one .npz file each, which appears when it is complete."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from evalstop_lab.rlhf.policy import Policy, Task
from evalstop_lab.rlhf.trainer import Config, Moments, State, Trainer


def save_checkpoint(folder: Path, trainer: Trainer) -> Path:
    """Write all that the run depends on to step-NNNNNN.npz in `folder`; return its absolute path."""
    state = trainer.state
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"step-{state.step:06d}.npz"
    unfinished = path.with_name(f".{path.name}")
    np.savez(
        unfinished,
        config=np.array(json.dumps(asdict(trainer.config))),
        step=state.step,
        parameters=state.policy.parameters,
        moments_mean=state.moments.mean,
        moments_square=state.moments.square,
        moments_count=state.moments.count,
    )
    return unfinished.replace(path)


def load_checkpoint(path: Path) -> Trainer:
    """A trainer that continues the run of a file of `save_checkpoint`."""
    with np.load(path, allow_pickle=False) as stored:
        fields = json.loads(str(stored["config"]))
        config = Config(**{**fields, "task": Task(**fields["task"])})
        moments = Moments(stored["moments_mean"], stored["moments_square"], int(stored["moments_count"]))
        return Trainer(config, State(int(stored["step"]), Policy(config.task, stored["parameters"]), moments))
