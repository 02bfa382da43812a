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
from evalstop_lab.replay.cells import add_row, number_of, shown, step_of
from evalstop_lab.replay.runs import Roles, Runs, Troubles


def metrics(path: Path, troubles: Troubles) -> set[str]:
    """The metrics of the file."""
    _state.cache_clear()
    keys: set[str] = set()
    for _, row in _rows(path, troubles):
        keys.update(row)
    return keys


def read(path: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    """Read the log history."""
    run = runs.run(name, roles)
    reached: object = None
    for index, row in _rows(path, troubles):
        try:
            reached = row.get(roles.step, reached if roles.step != "step" else None)
            add_row(run, step_of(reached), row, number_of)
        except ValueError as error:
            troubles.add(UnreadableInput(path, f"entry {index} of log_history: {error}"))
    planned = _state(path).get("max_steps")
    if isinstance(planned, int) and planned > 0:
        run.total_steps = planned


def _rows(path: Path, troubles: Troubles) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        history = _state(path)["log_history"]
    except UnreadableInput as error:
        troubles.add(error)
        return
    for index, row in enumerate(history):
        if isinstance(row, dict):
            yield index, row
        else:
            words = f"entry {index} of log_history is {shown(row)}; an entry is an object"
            troubles.add(UnreadableInput(path, words))


@lru_cache(maxsize=1)  # a log is read twice: for its metrics and for their values
def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableInput(path, f"{error.strerror}; give a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            path, f"this is no JSON ({error}); JSON lines are read from files named .jsonl"
        ) from error
    if isinstance(state, list):
        return {"log_history": state}
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UnreadableInput(
            path, "it has no list `log_history`; give a trainer_state.json, or JSON lines in a file named .jsonl"
        )
    return state
