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
from evalstop_lab.replay.cells import add_row, number_of, run_of, shown, step_of
from evalstop_lab.replay.lines import lines
from evalstop_lab.replay.runs import Roles, Runs, Troubles

ROW = 'one row is {"run": "a", "step": 10, "eval": 0.61, "proxy": 1.2, "kl": 3.4}'

_decode = msgspec.json.Decoder().decode


def metrics(path: Path, troubles: Troubles) -> set[str]:
    """The keys that occur."""
    keys: set[str] = set()
    for _, row in _rows(path, troubles):
        keys.update(row)
    return keys


def read(path: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    """Read every row.

    A file whose first row names no run holds one run, called `name`; otherwise every row must name its run.
    """
    alone: bool | None = None
    reached: dict[str, int] = {}
    for number, row in _rows(path, troubles):
        try:
            alone = "run" not in row if alone is None else alone
            run = name if alone and "run" not in row else run_of(row.get("run"))
            cell = row.get(roles.step)
            if cell is None and roles.step != "step":
                cell = reached.get(run)  # W&B logs a step in several rows, some without the step
                if cell is None:
                    continue
            step = reached[run] = step_of(cell)
            add_row(runs.run(run, roles), step, row, number_of)
        except ValueError as error:
            troubles.add(UnreadableInput(path, f"{error}; {ROW}", number))


def _rows(path: Path, troubles: Troubles) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines(path, troubles):
        try:
            row = _row(path, number, line)
        except UnreadableInput as error:
            troubles.add(error)
            continue
        if type(data := row.get("data")) is dict:
            row = {"step": row.get("step")} | data
        yield number, row


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = _decode(line)
    except (msgspec.DecodeError, RecursionError):
        row = _with_bare_tokens(path, number, line)
    if not isinstance(row, dict):
        raise UnreadableInput(path, f"{shown(row)} is no JSON object; {ROW}", number)
    return row


def _with_bare_tokens(path: Path, number: int, line: str) -> object:
    """Parse NaN and Infinity without quotes, which Python writes although they are not JSON."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate, which is not valid text
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(path, f"this is no JSON ({error}); {ROW}", number) from error
    return row
