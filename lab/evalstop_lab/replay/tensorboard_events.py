"""Reads TensorBoard event files: the scalars of one folder are one run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from evalstop_client.tensorboard import Scalar, find_event_files, read_all_scalars

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs, add_row, parse_number, parse_step


def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
    _load_scalars.cache_clear()
    try:
        return {scalar.tag for scalar in _load_scalars(path)}
    except UnreadableInput as error:
        errors.add(error)
        return set()


def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
    """Read the scalars of a folder or an event file.

    Values written by a trainer that restarted from an earlier step supersede those after that step.
    """
    run = runs.run(name, roles)
    tags = {tag for _, column in roles.cells for tag in (column, f"{column}_stderr")}
    rows: dict[int, dict[str, float]] = {}
    moments: list[float] = []
    for scalar in _load_scalars(path):
        if scalar.tag in tags:
            moments.append(scalar.wall_time)
            rows.setdefault(scalar.step, {})[scalar.tag] = scalar.value
    if moments:
        run.seconds = max(moments) - min(moments)
    for step, row in rows.items():
        try:
            add_row(run, parse_step(step), row, parse_number)
        except ValueError as error:
            errors.add(UnreadableInput(path, str(error)))


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
