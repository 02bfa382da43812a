"""Reads `evaluations.npz` of stable-baselines3's EvalCallback: the mean return of each evaluation and its noise."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from evalstop_detectors.roles.recognition import PRESET_TAG

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs, add_row, parse_number, parse_step

LARGEST = 256 << 20
"""Bytes of an array, unpacked."""

_COLUMNS = {"results": "eval/mean_reward", "successes": "eval/success_rate"}
"""The names that the callback's other loggers use, by array."""


def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
    try:
        return {"step"} | {column for row in _read_rows(path).values() for column in row}
    except UnreadableInput as error:
        errors.add(error)
        return set()


def read_tags(path: Path) -> dict[str, str]:
    """The trainer, which two names alone do not tell."""
    return {PRESET_TAG: "stable-baselines3"}


def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
    run = runs.run(name, roles)
    for step, row in _read_rows(path).items():
        try:
            add_row(run, parse_step(step), row, parse_number)
        except ValueError as error:
            errors.add(UnreadableInput(path, str(error)))


def _read_rows(path: Path) -> dict[int, dict[str, float]]:
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
