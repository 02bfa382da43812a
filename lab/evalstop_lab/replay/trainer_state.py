"""Reads `trainer_state.json` of the Hugging Face Trainer: its `log_history`, one run per file.

A JSON file with a list of rows, as from W&B's `run.history()`, is read in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, format_cell, parse_number, parse_step
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs


def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
    _load_state.cache_clear()
    return {key for _, row in _read_rows(path, errors) for key in row}


def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
    run = runs.run(name, roles)
    reached: object = None
    for index, row in _read_rows(path, errors):
        try:
            reached = row.get(roles.step, reached if roles.step != "step" else None)
            add_row(run, parse_step(reached), row, parse_number)
        except ValueError as error:
            errors.add(UnreadableInput(path, f"entry {index} of log_history: {error}"))
    planned = _load_state(path).get("max_steps")
    if isinstance(planned, int) and planned > 0:
        run.total_steps = planned


def _read_rows(path: Path, errors: ReadErrors) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        history = _load_state(path)["log_history"]
    except UnreadableInput as error:
        errors.add(error)
        return
    for index, row in enumerate(history):
        if isinstance(row, dict):
            yield index, row
        else:
            problem = f"entry {index} of log_history is {format_cell(row)}; an entry must be an object"
            errors.add(UnreadableInput(path, problem))


@lru_cache(maxsize=1)  # a log is read twice: for its metrics and for their values
def _load_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableInput(path, f"{error.strerror}; give a readable file") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(path, f"it is not JSON ({error}); JSON lines are read from files named .jsonl") from error
    if isinstance(state, list):
        return {"log_history": state}
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UnreadableInput(
            path, "it has no list `log_history`; give a trainer_state.json, or JSON lines in a file named .jsonl"
        )
    return state
