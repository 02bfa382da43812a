"""Saves and loads checkpoints: one .npz file each, written atomically."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from evalstop_lab.rlhf.policy import Policy, Task
from evalstop_lab.rlhf.trainer import Config, Moments, State


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a run needs to resume: its name, config and state."""

    run_name: str
    config: Config
    state: State


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write the checkpoint atomically to step-NNNNNN.npz in `folder`; return its absolute path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"step-{checkpoint.state.step:06d}.npz"
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    state = checkpoint.state
    try:
        with unfinished.open("wb") as file:
            np.savez(
                file,
                header=np.array(json.dumps({"run_name": checkpoint.run_name, "config": asdict(checkpoint.config)})),
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
        header = json.loads(str(stored["header"]))
        config = Config(**{**header["config"], "task": Task(**header["config"]["task"])})
        moments = Moments(stored["moments_mean"], stored["moments_square"], int(stored["moments_count"]))
        state = State(int(stored["step"]), Policy(config.task, stored["parameters"]), moments)
        return Checkpoint(header["run_name"], config, state)
