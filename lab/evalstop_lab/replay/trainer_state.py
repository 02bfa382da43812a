"""`trainer_state.json` of the Hugging Face Trainer: its `log_history`, one run a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_of, shown, step_of
from evalstop_lab.replay.runs import Runs


def read(path: Path, name: str, runs: Runs) -> set[str]:
    """Take in the log history; returns the metrics that occurred."""
    state = _state(path)
    run = runs.run(name)
    if isinstance(planned := state.get("max_steps"), int) and planned > 0:
        run.total_steps = planned
    keys: set[str] = set()
    for index, row in enumerate(state["log_history"]):
        if not isinstance(row, dict):
            raise UnreadableInput(path, f"entry {index} of log_history is {shown(row)}; an entry is an object")
        try:
            add_row(run, step_of(row.get("step")), row, runs.roles, number_of)
        except ValueError as error:
            raise UnreadableInput(path, f"entry {index} of log_history: {error}") from error
        keys.update(row)
    return keys - {"step", "epoch"}


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableInput(path, f"{error.strerror}; give a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            path, f"this is no JSON ({error}); JSON lines are read from files named .jsonl"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UnreadableInput(
            path, "it has no list `log_history`; give a trainer_state.json, or JSON lines in a file named .jsonl"
        )
    return state
