"""Reads runs from the binary files of TensorBoard and of stable-baselines3's EvalCallback."""

from __future__ import annotations

import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from evalstop_client.tensorboard import Scalar, find_event_files, read_all_scalars
from evalstop_detectors.roles.recognition import PRESET_TAG

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.rows import add_rows, parse_number
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs

LARGEST = 256 << 20
"""Bytes of an array, unpacked."""

_COLUMNS = {"results": "eval/mean_reward", "successes": "eval/success_rate"}
"""The names that the callback's other loggers use, by array."""


class EventFiles:
    """TensorBoard's event files: the scalars of one folder are one run.

    Values written by a trainer that restarted from an earlier step supersede those after that step.
    """

    @staticmethod
    def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
        _load_scalars.cache_clear()
        return {scalar.tag for scalar in _load_scalars(path)}

    @staticmethod
    def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
        """Read the scalars of a folder or an event file."""
        run = runs.run(name, roles)
        tags = {tag for _, column in roles.cells for tag in (column, f"{column}_stderr")}
        rows: dict[int, dict[str, float]] = {}
        scalars = [scalar for scalar in _load_scalars(path) if scalar.tag in tags]
        for scalar in scalars:
            rows.setdefault(scalar.step, {})[scalar.tag] = scalar.value
        if moments := [scalar.wall_time for scalar in scalars]:
            run.seconds = max(moments) - min(moments)
        add_rows(run, ((None, step, row) for step, row in rows.items()), parse_number, path, errors)


@lru_cache(maxsize=1)  # a log is read twice: for its metrics and for their values
def _load_scalars(path: Path) -> tuple[Scalar, ...]:
    files = (
        [path] if path.is_file() else next((files for folder, files in find_event_files(path) if folder == path), [])
    )
    scalars: list[Scalar] = []
    has_events = False
    for portion in read_all_scalars(files):
        has_events = True
        if portion.restarts_at is not None:
            scalars = [scalar for scalar in scalars if scalar.step < portion.restarts_at]
        scalars += portion.scalars
    if not has_events:
        raise UnreadableInput(path, "it is not a TensorBoard event file, or it is empty")
    return tuple(scalars)


class Evaluations:
    """`evaluations.npz` of stable-baselines3: the mean return of each evaluation and its noise."""

    @staticmethod
    def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
        return {"step"} | {column for row in _read_evaluations(path).values() for column in row}

    @staticmethod
    def read_tags(path: Path) -> dict[str, str]:
        """The trainer, which two names alone do not tell."""
        return {PRESET_TAG: "stable-baselines3"}

    @staticmethod
    def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
        rows = _read_evaluations(path).items()
        add_rows(runs.run(name, roles), ((None, step, row) for step, row in rows), parse_number, path, errors)


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
