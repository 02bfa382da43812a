"""Reads runs from the binary files of TensorBoard and of stable-baselines3's EvalCallback."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from evalstop_client.tensorboard import find_event_files, read_all_scalars
from evalstop_detectors.roles.recognition import PRESET_TAG

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.rows import LoggedRun

LARGEST = 256 << 20
"""Bytes of an array, unpacked."""

_COLUMNS = {"results": "eval/mean_reward", "successes": "eval/success_rate"}
"""The names that the callback's other loggers use, by array."""


def parse_events(path: Path) -> LoggedRun:
    """TensorBoard's event files: the scalars of one folder, or of a file, are one run.

    Values written by a trainer that restarted from an earlier step supersede those after that step.
    """
    files = (
        [path] if path.is_file() else next((files for folder, files in find_event_files(path) if folder == path), [])
    )
    rows: dict[int, dict[str, float]] = {}
    moments: list[float] = []
    has_events = False
    for portion in read_all_scalars(files):
        has_events = True
        if portion.restarts_at is not None:
            rows = {step: row for step, row in rows.items() if step < portion.restarts_at}
        for scalar in portion.scalars:
            rows.setdefault(scalar.step, {})[scalar.tag] = scalar.value
        moments += [scalar.wall_time for scalar in portion.scalars]
    if not has_events:
        raise UnreadableInput(path, "it is not a TensorBoard event file, or it is empty")
    seconds = max(moments) - min(moments) if moments else None
    return LoggedRun([(None, step, row) for step, row in rows.items()], seconds=seconds)


def parse_evaluations(path: Path) -> LoggedRun:
    """`evaluations.npz` of stable-baselines3: the mean return of each evaluation and its noise.

    Its tag is the trainer, which two names alone do not tell.
    """
    rows = [(None, step, row) for step, row in _read_evaluations(path).items()]
    return LoggedRun(rows, tags={PRESET_TAG: "stable-baselines3"})


def _read_evaluations(path: Path) -> dict[int, dict[str, float]]:
    """By step the mean of each array over the episodes, and its standard error where there are several."""
    rows: dict[int, dict[str, float]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            if any(item.file_size > LARGEST for item in archive.infolist()):
                raise ValueError(f"an array takes more than {LARGEST:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            steps = arrays["timesteps"].astype(np.int64).tolist()
            for key, column in _COLUMNS.items():
                if key not in arrays:
                    continue
                episodes = arrays[key].astype(float).reshape(len(steps), -1)
                count = episodes.shape[1]
                for step, values in zip(steps, episodes, strict=True):
                    rows.setdefault(step, {})[column] = float(values.mean())
                    if count > 1:
                        rows[step][f"{column}_stderr"] = float(values.std(ddof=1) / count**0.5)
    except OSError as error:
        raise UnreadableInput(path, f"{error.strerror or error}; give a readable file") from error
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UnreadableInput(path, f"{error}; give an evaluations.npz of stable-baselines3") from error
    return rows
