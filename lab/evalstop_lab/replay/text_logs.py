"""Reads runs from text: JSON lines, CSV, the Trainer's state, and the console output of trainers."""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from evalstop_client.callbacks.arguments import is_plan_meant
from evalstop_detectors.roles.params import EVAL_TAG

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.rows import (
    LoggedRun,
    Row,
    format_cell,
    open_log,
    read_lines,
    without_gz,
)
from evalstop_lab.replay.runs import ReadErrors

ROW = 'one row is {"run": "a", "step": 10, "eval": 0.61, "proxy": 1.2, "kl": 3.4}'

_decode = msgspec.json.Decoder().decode


def read_json_lines(path: Path, errors: ReadErrors) -> Iterator[Row]:
    """Rows such as `{"run": "a", "step": 10, "eval": 0.61, "eval_stderr": 0.02}`.

    verl's file logger puts the metrics of a step under `data`.
    """
    for number, line in read_lines(path, errors):
        try:
            row = _parse_row(path, number, line)
        except UnreadableInput as error:
            if line.endswith("\n") or number == 1:
                errors.append(error)
            else:
                problem = "it ends in the middle of this line; all before it is read"
                errors.append(UnreadableInput(path, problem, number))
            continue
        if type(data := row.get("data")) is dict:
            row = {"step": row.get("step")} | data
        yield number, None, row


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


def read_csv(path: Path, errors: ReadErrors) -> Iterator[Row]:
    """Rows below a header with `step`, a column per role, and `run` unless the file is a single run."""
    number = 0

    def read_texts() -> Iterator[str]:
        nonlocal number
        for number, line in read_lines(path, errors):  # noqa: B007 - a row may take several lines
            yield line

    rows = csv.reader(read_texts(), delimiter="\t" if without_gz(path).suffix == ".tsv" else ",", strict=True)
    first: list[str] = []
    header: list[str] = []
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            errors.append(UnreadableInput(path, str(error), number))
            continue
        if cells is None:
            return
        if cells == first:
            continue  # a trainer that started again appended to the file
        if not header:
            first, header = cells, [cell.strip() for cell in cells]
            if header.count("") > 1:
                unnamed = ", ".join(str(number) for number, cell in enumerate(header, 1) if not cell)
                errors.append(UnreadableInput(path, f"columns {unnamed} of the header have no name; name them", 1))
                return
            if repeated := {cell for cell in header if header.count(cell) > 1}:
                problem = f"the header has {', '.join(sorted(repeated))} twice; name each column once"
                errors.append(UnreadableInput(path, problem, 1))
                return
        elif len(cells) != len(header):
            problem = f"{len(cells)} cells where the header has {len(header)}; quote cells with commas"
            errors.append(UnreadableInput(path, problem, number))
        else:
            yield number, None, dict(zip(header, cells, strict=True))


def parse_trainer_state(path: Path) -> LoggedRun:
    """`trainer_state.json` of the Hugging Face Trainer: its `log_history`.

    A JSON file with a list of rows, as from W&B's `run.history()`, is read in the same way.
    """
    state = _load_state(path)
    entries = list(enumerate(state["log_history"]))
    places = [(index, row) for index, row in entries if isinstance(row, dict)]
    errors = [
        UnreadableInput(path, f"entry {index} of log_history is {format_cell(row)}; an entry must be an object")
        for index, row in entries
        if not isinstance(row, dict)
    ]
    callbacks, planned = state.get("stateful_callbacks"), state.get("max_steps")
    stops_early = isinstance(callbacks, dict) and "EarlyStoppingCallback" in callbacks
    rates = [rate for _, row in places if isinstance(rate := row.get("learning_rate"), float)]
    is_constant = len(rates) > 1 and rates[-2] == rates[-1] == max(rates)
    # Once the training is over, the trainer may load the best model again and measure it.
    ends = (at for at, (_, row) in enumerate(places) if "train_runtime" in row and state.get("best_model_checkpoint"))
    return LoggedRun(
        [(f"entry {index} of log_history", None, row) for index, row in places[: next(ends, None)]],
        errors,
        tags=_find_chosen_eval(state, [row for _, row in places]),
        total_steps=planned if isinstance(planned, int) and planned > 0 else None,
        stopped_early=_describe_early_stop(state),
        doubts_plan=not is_plan_meant(is_constant=is_constant, stops_early=stops_early),
    )


def _find_chosen_eval(state: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The eval by which the trainer chose its best model: the one that had the state's `best_metric` at its best step,
    as its highest or lowest value."""
    best, at = state.get("best_metric"), state.get("best_global_step")
    if not isinstance(best, float | int):
        return {}
    if at is None and (saved := re.search(r"checkpoint-(\d+)$", str(state.get("best_model_checkpoint") or ""))):
        at = int(saved[1])
    histories: dict[str, list[float]] = {}
    fitting = set()
    for row in rows:
        for column, cell in row.items():
            if type(cell) in (float, int) and column.startswith("eval_"):
                histories.setdefault(column, []).append(cell)
                if cell == best and at in (None, row.get("step")):
                    fitting.add(column)
    ends = {column: (min(histories[column]), max(histories[column])) for column in fitting}
    extreme = [column for column, (low, high) in ends.items() if best in (low, high) and low < high]
    if len(extreme) != 1:
        return {}
    return {EVAL_TAG: f"{extreme[0]}:{'maximize' if best == ends[extreme[0]][1] else 'minimize'}"}


def _describe_early_stop(state: dict[str, Any]) -> str:
    """Whether the state of transformers' EarlyStoppingCallback shows that it ended the run; empty if not."""
    saved = state.get("stateful_callbacks")
    stopping = saved.get("EarlyStoppingCallback") if isinstance(saved, dict) else None
    items: list[Any] = stopping if isinstance(stopping, list) else [stopping]
    for item in items:
        try:
            patience = item["args"]["early_stopping_patience"]
            if item["attributes"]["early_stopping_patience_counter"] >= patience:
                return f"EarlyStoppingCallback ended it, after {patience} evals without an improvement"
        except (KeyError, TypeError):
            continue
    return ""


def _load_state(path: Path) -> dict[str, Any]:
    try:
        with open_log(path) as file:
            state = json.load(file)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableInput(path, f"{getattr(error, 'strerror', 0) or error}; give a readable file") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(path, f"it is not JSON ({error}); JSON lines are read from files named .jsonl") from error
    if isinstance(state, list):
        return {"log_history": state}
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UnreadableInput(
            path, "it has no list `log_history`; give a trainer_state.json, or JSON lines in a file named .jsonl"
        )
    return state


_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_VERL = re.compile(r"\bstep:(\d+) - (\S.*)$")
_VERL_CELL = re.compile(rf"(?:np\.float\d+\()?({_NUMBER})\)?$")
_OPENRLHF = re.compile(r"Global step (\d+)(?: \[replay\])?: \{(.*)\}")
_OPENRLHF_CELL = re.compile(rf"'([^']+)': (?:np\.float\d+\(|tensor\()?({_NUMBER})\b")
_VERL_PLAN = re.compile(r"Total training steps: ([1-9]\d{0,14})\b")


CONSOLE_MARKS = re.compile(rb"\bstep:\d+ - \S|Global step \d+(?: \[replay\])?: \{")


def parse_console(path: Path) -> LoggedRun:
    """The console output of verl or OpenRLHF.

    verl        `step:3 - critic/score/mean:0.512 - actor/ppo_kl:0.001`
    OpenRLHF    `... Global step 3: {'reward': 0.41, 'kl': 0.02, ...}`

    All else in such a file is ignored, as are Ray's prefixes and colors. verl rounds to three digits, and prints the
    planned length.
    """
    rows: list[Row] = []
    errors: ReadErrors = []
    planned = None
    for number, raw in read_lines(path, errors):
        line = _COLORS.sub("", raw).strip()
        if match := _VERL.search(line):
            cells = (cell.rpartition(":") for cell in match[2].split(" - "))
            rows.append(
                (number, match[1], {key: value[1] for key, _, cell in cells if (value := _VERL_CELL.match(cell))})
            )
        elif match := _VERL_PLAN.search(line):
            planned = int(match[1])
        elif match := _OPENRLHF.search(line):
            rows.append((number, match[1], dict(_OPENRLHF_CELL.findall(match[2]))))
    return LoggedRun(rows, errors, total_steps=planned)
