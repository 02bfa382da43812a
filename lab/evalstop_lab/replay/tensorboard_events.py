"""Reads TensorBoard event files: the scalars of one folder are one run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from evalstop_client.tensorboard.events import Scalar
from evalstop_client.tensorboard.tail import find_event_files, read_all_scalars

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_of, step_of
from evalstop_lab.replay.runs import Roles, Runs, Troubles


def metrics(path: Path, troubles: Troubles) -> set[str]:
    """The tags of the scalars."""
    _loaded.cache_clear()
    try:
        return {scalar.tag for scalar in _loaded(path)}
    except UnreadableInput as error:
        troubles.add(error)
        return set()


def read(path: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    """Read the scalars of a folder or an event file.

    Values written by a trainer that restarted from an earlier step supersede those after that step.
    """
    run = runs.run(name, roles)
    wanted = {tag for column in roles.columns.values() for tag in (column, f"{column}_stderr")}
    rows: dict[int, dict[str, float]] = {}
    moments: list[float] = []
    for scalar in _loaded(path):
        if scalar.tag in wanted:
            moments.append(scalar.wall_time)
            rows.setdefault(scalar.step, {}).setdefault(scalar.tag, scalar.value)
    if moments:
        run.seconds = max(moments) - min(moments)
    for step, row in rows.items():
        try:
            add_row(run, step_of(step), row, number_of)
        except ValueError as error:
            troubles.add(UnreadableInput(path, str(error)))


@lru_cache(maxsize=1)  # a log is read twice: for its metrics and for their values
def _loaded(path: Path) -> tuple[Scalar, ...]:
    files = (
        [path] if path.is_file() else next((files for folder, files in find_event_files(path) if folder == path), [])
    )
    scalars: list[Scalar] = []
    whole = False
    for portion in read_all_scalars(files):
        whole = True
        if portion.restarts_at is not None:
            scalars = [scalar for scalar in scalars if scalar.step < portion.restarts_at]
        scalars += portion.scalars
    if not whole:
        raise UnreadableInput(path, "this is not a TensorBoard event file, or it is empty")
    return tuple(scalars)
