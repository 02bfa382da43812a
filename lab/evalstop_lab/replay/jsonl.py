"""Reads JSON lines: one object per step, `{"run": "a", "step": 10, "eval": 0.61, "eval_stderr": 0.02}`.

verl's file logger puts the metrics of a step under `data`, and W&B's history counts steps in its own column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, format_cell, parse_number, parse_run_name, parse_step
from evalstop_lab.replay.lines import read_lines
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs

ROW = 'one row is {"run": "a", "step": 10, "eval": 0.61, "proxy": 1.2, "kl": 3.4}'

_decode = msgspec.json.Decoder().decode


def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
    return {key for _, row in _read_rows(path, errors) for key in row}


def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
    """Read every row.

    A file whose first row names no run holds one run, called `name`; otherwise every row must name its run.
    """
    alone: bool | None = None
    reached: dict[str, int] = {}
    for number, row in _read_rows(path, errors):
        try:
            alone = "run" not in row if alone is None else alone
            run = name if alone and "run" not in row else parse_run_name(row.get("run"))
            cell = row.get(roles.step)
            if cell is None and roles.step != "step":
                cell = reached.get(run)  # W&B logs a step in several rows, some without the step
                if cell is None:
                    continue
            step = reached[run] = parse_step(cell)
            add_row(runs.run(run, roles), step, row, parse_number)
        except ValueError as error:
            errors.add(UnreadableInput(path, f"{error}; {ROW}", number))


def _read_rows(path: Path, errors: ReadErrors) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in read_lines(path, errors):
        try:
            row = _parse_row(path, number, line)
        except UnreadableInput as error:
            errors.add(error)
            continue
        if type(data := row.get("data")) is dict:
            row = {"step": row.get("step")} | data
        yield number, row


def _parse_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = _decode(line)
    except (msgspec.DecodeError, RecursionError):
        row = _parse_nonfinite(path, number, line)
    if not isinstance(row, dict):
        raise UnreadableInput(path, f"{format_cell(row)} is not a JSON object; {ROW}", number)
    return row


def _parse_nonfinite(path: Path, number: int, line: str) -> object:
    """Parse NaN and Infinity without quotes, which Python writes although they are not JSON."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate, which is not valid text
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(path, f"it is not JSON ({error}); {ROW}", number) from error
    return row
