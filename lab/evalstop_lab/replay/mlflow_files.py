"""Reads MLflow's file store: a folder per run with `meta.yaml`, and a file per metric under `metrics/`.

A line is `milliseconds value step`; further columns of newer versions are ignored, and for the oldest versions, which
had no step, lines are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from evalstop_detectors import find_total_steps
from evalstop_detectors.roles import planned_length

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, gpus_in, number_in, step_of
from evalstop_lab.replay.lines import lines
from evalstop_lab.replay.runs import Roles, Run, Runs, Troubles

LARGEST_META = 10_000
"""In characters. MLflow's have some hundred; libyaml crashes on a hundred thousand nested levels."""

_LAST_MILLISECOND = 253_402_300_799_999  # of the year 9999

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


def metrics(folder: Path, troubles: Troubles) -> set[str]:
    """The metrics, by their paths."""
    root = folder / "metrics"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def tags(folder: Path) -> dict[str, str]:
    """The tags of the run that have one line."""
    root = folder / "tags"
    return {str(path.relative_to(root)): _text(path) for path in root.rglob("*") if path.is_file()}


def read(folder: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    """Read one run, named by its MLflow name and the start of its id; deleted runs are ignored."""
    meta = _meta(folder, troubles)
    if meta.get("lifecycle_stage") == "deleted":
        return
    run = runs.run(called(meta.get("run_name"), str(meta.get("run_id", folder.name))), roles)
    set_cost(run, meta.get("start_time"), meta.get("end_time"), _text(folder / "params" / "gpus"))
    params = {name: _text(folder / "params" / name) for name in planned_length.NAMES}
    run.total_steps = find_total_steps(params) or find_total_steps(tags(folder)) or run.total_steps
    there = metrics(folder, troubles)
    for column in roles.columns.values():
        for metric in (column, f"{column}_stderr"):
            if metric in there and metric == column:
                _read_metric(folder, column, f"{column}_stderr" in there, run, troubles)


def called(name: object, run_id: str) -> str:
    """The name of an MLflow run: names may repeat, ids do not."""
    return f"{name} ({run_id[:8]})" if name else run_id


def set_cost(run: Run, began: object, ended: object, gpus: str) -> None:
    """Set how long a run lasted, from milliseconds since 1970, and its GPUs, from the parameter or tag `gpus`."""
    if isinstance(began, int) and isinstance(ended, int) and 0 < began <= ended <= _LAST_MILLISECOND:
        run.seconds = (ended - began) / 1000
    run.gpus = gpus_in(gpus)


def _read_metric(folder: Path, column: str, with_stderr: bool, run: Run, troubles: Troubles) -> None:
    path = folder / "metrics" / column
    stderrs = dict(_read_values(folder / "metrics" / f"{column}_stderr", Troubles(strict=False))) if with_stderr else {}
    for step, value in _read_values(path, troubles):
        try:
            add_row(run, step, {column: value, f"{column}_stderr": stderrs.get(step)}, number_in)
        except ValueError as error:
            troubles.add(UnreadableInput(path, str(error)))


def _read_values(path: Path, troubles: Troubles) -> list[tuple[int, str]]:
    found = []
    for number, line in lines(path, troubles):
        cells = line.split()
        try:
            if len(cells) < 2:
                raise ValueError("a line is `milliseconds value step`")
            number_in(cells[1], "the value")
            found.append((step_of(cells[2]) if len(cells) > 2 else number - 1, cells[1]))
        except ValueError as error:
            troubles.add(UnreadableInput(path, str(error), number))
    return found


def _meta(folder: Path, troubles: Troubles) -> dict[str, Any]:
    path = folder / "meta.yaml"
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST_META + 1)
        if len(text) > LARGEST_META:
            raise ValueError(f"it is longer than {LARGEST_META:,} characters")
        meta = yaml.load(text, Loader=_Loader)  # noqa: S506 - the safe loader, written in C
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        troubles.add(UnreadableInput(path, f"{error}; give the meta.yaml that MLflow wrote"))
        return {}
    return meta if isinstance(meta, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
