"""JSON lines: one object an observation set, `{"run": "a", "step": 10, "eval": 0.61, "eval_stderr": 0.02}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_of, run_of, shown, step_of
from evalstop_lab.replay.lines import lines
from evalstop_lab.replay.runs import Runs

ROW = 'one row is {"run": "a", "step": 10, "eval": 0.61, "proxy": 1.2, "kl": 3.4}'

_decode = msgspec.json.Decoder().decode


def read(path: Path, name: str, runs: Runs) -> set[str]:
    """Take in every row; returns the keys that occurred beside run and step.

    A file whose first row names no run holds one run, called `name`; otherwise every row has to name its run.
    """
    keys: set[str] = set()
    alone: bool | None = None
    for number, line in lines(path):
        row = _row(path, number, line)
        try:
            alone = "run" not in row if alone is None else alone
            run = runs.run(name if alone and "run" not in row else run_of(row.get("run")))
            add_row(run, step_of(row.get("step")), row, runs.roles, number_of)
        except ValueError as error:
            raise UnreadableInput(path, f"{error}; {ROW}", number) from error
        keys.update(row)
    return keys - {"run", "step"}


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = _decode(line)
    except (msgspec.DecodeError, RecursionError):
        row = _with_bare_tokens(path, number, line)
    if not isinstance(row, dict):
        raise UnreadableInput(path, f"{shown(row)} is no JSON object; {ROW}", number)
    return row


def _with_bare_tokens(path: Path, number: int, line: str) -> object:
    """Python writes NaN and Infinity without quotes, which is no JSON; its own reader takes them."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(path, f"this is no JSON ({error}); {ROW}", number) from error
