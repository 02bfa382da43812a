"""Reads MLflow's file store: a folder per run with `meta.yaml`, and a file per metric under `metrics/`.

A line is `milliseconds value step`; further columns of newer versions are ignored, and for the oldest versions, which
had no step, lines are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from evalstop_detectors import find_total_steps
from evalstop_detectors.roles.params import BEST_METRIC, GREATER_IS_BETTER, LENGTH_NAMES

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.rows import Number, add_rows, parse_gpus, parse_step, parse_text_number, read_lines
from evalstop_lab.replay.runs import ReadErrors, Roles, Run, Runs

LARGEST_META = 10_000
"""In characters. MLflow's files have some hundred; libyaml crashes on 100,000 nested levels."""

_LAST_MILLISECOND = 253_402_300_799_999  # of the year 9999

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def is_run(folder: Path) -> bool:
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


def list_metrics(folder: Path, errors: ReadErrors) -> set[str]:
    """The metrics, which are named by their paths."""
    root = folder / "metrics"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def read_tags(folder: Path) -> dict[str, str]:
    """The tags, and the params by which transformers says which metric counts."""
    root = folder / "tags"
    params = {name: _read_text(folder / "params" / name) for name in (BEST_METRIC, GREATER_IS_BETTER)}
    return params | {str(path.relative_to(root)): _read_text(path) for path in root.rglob("*") if path.is_file()}


def read_runs(folder: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
    """Read one run, named by its MLflow name and the start of its id; deleted runs are ignored."""
    meta = _read_meta(folder, errors)
    if meta.get("lifecycle_stage") == "deleted":
        return
    run = runs.run(name_run(meta.get("run_name"), str(meta.get("run_id", folder.name))), roles)
    set_cost(run, meta.get("start_time"), meta.get("end_time"), _read_text(folder / "params" / "gpus"))
    params = {name: _read_text(folder / "params" / name) for name in LENGTH_NAMES}
    run.total_steps = find_total_steps(params) or find_total_steps(read_tags(folder)) or run.total_steps
    root = folder / "metrics"
    read = partial(_read_values, root)
    add_histories(run, list_metrics(folder, errors), read, parse_text_number, root.joinpath, errors)


def name_run(name: object, run_id: str) -> str:
    """The unique name of an MLflow run: its name and the end of its id, which EvalStop begins with the time."""
    return f"{name} ({run_id[-8:]})" if name else run_id


def set_cost(run: Run, started: object, ended: object, gpus: str) -> None:
    """Set the duration of a run, from milliseconds since 1970, and its GPUs, from the parameter or tag `gpus`."""
    if isinstance(started, int) and isinstance(ended, int) and 0 < started <= ended <= _LAST_MILLISECOND:
        run.seconds = (ended - started) / 1000
    run.gpus = parse_gpus(gpus)


def add_histories(
    run: Run,
    metrics: Collection[str],
    read: Callable[[str, ReadErrors], Iterable[tuple[int, object]]],
    number: Number,
    locate: Callable[[str], Path | str],
    errors: ReadErrors,
) -> None:
    """Add the metrics of the run that have a role. `read`: the steps and values of one; `locate`: where errors are."""
    for _, column in run.roles.cells:
        if column in metrics:
            stderr_column = f"{column}_stderr"
            stderrs = dict(read(stderr_column, ReadErrors(strict=False))) if stderr_column in metrics else {}
            rows = (
                (None, step, {column: value, stderr_column: stderrs.get(step)}) for step, value in read(column, errors)
            )
            add_rows(run, rows, number, locate(column), errors)


def _read_values(root: Path, metric: str, errors: ReadErrors) -> list[tuple[int, str]]:
    path, values = root / metric, []
    for number, line in read_lines(path, errors):
        cells = line.split()
        try:
            if len(cells) < 2:
                raise ValueError("a line must be `milliseconds value step`")
            parse_text_number(cells[1], "the value")
            values.append((parse_step(cells[2]) if len(cells) > 2 else number - 1, cells[1]))
        except ValueError as error:
            errors.add(UnreadableInput(path, str(error), number))
    return values


def _read_meta(folder: Path, errors: ReadErrors) -> dict[str, Any]:
    path = folder / "meta.yaml"
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST_META + 1)
        if len(text) > LARGEST_META:
            raise ValueError(f"it is longer than {LARGEST_META:,} characters")
        meta = yaml.load(text, Loader=_Loader)  # noqa: S506 - the safe loader, written in C
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        errors.add(UnreadableInput(path, f"{error}; give a meta.yaml of MLflow"))
        return {}
    return meta if isinstance(meta, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
