"""Reads the numbered lines of a file, and adds the cells of rows to runs."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from evalstop_detectors import MetricRole

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.runs import MAX_STEP, ReadErrors, Roles, Run, Runs, Series

LONGEST_LINE = 1 << 20


def without_gz(path: Path) -> Path:
    """The name of what a gzipped file holds; other paths as they are."""
    return path.with_suffix("") if path.suffix == ".gz" else path


def open_log(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_lines(path: Path, errors: ReadErrors) -> Iterator[tuple[int, str]]:
    """Yield each nonblank line with its number, from 1; invalid text is reported to `errors`."""
    try:
        with open_log(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    problem = f"the line is longer than {LONGEST_LINE:,} bytes; write one row per line"
                    errors.append(UnreadableInput(path, problem, number))
                    return  # a file without line breaks is not text
                if line.isspace():
                    continue
                try:
                    yield number, _decode_line(path, number, line)
                except UnreadableInput as error:
                    errors.append(error)
    except OSError as error:
        errors.append(UnreadableInput(path, f"{error.strerror or error}; give a readable file"))
    except (EOFError, zlib.error) as error:
        errors.append(UnreadableInput(path, f"its compression ends early or is damaged; all before is read ({error})"))


def _decode_line(path: Path, number: int, line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableInput(
            path, f"byte {error.start + 1} is not valid UTF-8; give a text file in UTF-8", number
        ) from error
    if "\0" in text:
        raise UnreadableInput(path, "it has NUL bytes; give a text file in UTF-8", number)
    return text


STEPS = (
    *("step", "train/global_step", "trainer/global_step", "global_step", "time/total_timesteps", "current_steps"),
    *("_step", "Step", "epoch"),
)
"""Columns that count steps, in order of preference; W&B's own `_step` counts calls of its logger. Epochs count where
nothing else does, as in Ultralytics' results.csv."""

SECONDS = ("seconds", "_runtime")
"""Columns with the seconds since the start of the run."""

MOST_GPUS = 1_000_000
"""Larger numbers are errors, which would dominate all costs."""

TOTAL_STEPS = "total_steps"
"""A column with the planned number of steps of its run, in any of its rows."""

NO_METRICS = frozenset({"run", "gpus", "_timestamp", TOTAL_STEPS, *STEPS, *SECONDS})


def add_row(run: Run, step: int, row: Mapping[str, Any]) -> None:
    """Add the values of one row to the run."""
    combined = run.roles.combined
    for role, column in run.roles.cells:
        cell = row.get(column)
        if cell is None or (value := parse_number(cell, column)) is None:
            continue
        stderr = row.get(f"{column}_stderr")
        error = None if stderr is None else check_stderr(parse_number(stderr, f"{column}_stderr"), role)
        if combined and column in combined:
            run.parts.setdefault(column, Series()).add(step, value, error)
        else:
            run.add(role, step, value, error)
        if role is MetricRole.EVAL and (version := row.get(f"{column}_version")) not in (None, ""):
            run.eval_versions[step] = str(version)
    for column in SECONDS:
        if (cell := row.get(column)) is not None and (seconds := parse_number(cell, column)) is not None:
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{column} is {seconds:g}; give a finite number of at least 0, or leave it out")
            run.seconds = max(run.seconds or 0.0, seconds)
    if (cell := row.get(TOTAL_STEPS)) not in (None, "", run.total_steps):
        run.total_steps = parse_total_steps(cell)
    if (cell := row.get("gpus")) is not None:
        if (gpus := parse_gpus(cell)) is None:
            raise ValueError(f"gpus is {format_cell(cell)}; give a number from 0 to {MOST_GPUS:,}, or leave it out")
        run.gpus = gpus


Row = tuple[int | str | None, object, Mapping[str, Any]]
"""The place of a row in its log (a line, or the words that an error begins with), its step, and its cells.

A step of None is in the cells, in the column that counts steps.
"""


@dataclass(frozen=True)
class LoggedRun:
    """A log of one run: its rows, and what it tells beside them. `tags`: what tells which metric counts."""

    rows: Sequence[Row]
    errors: ReadErrors = field(default_factory=list)
    tags: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    gpus: float | None = None
    seconds: float | None = None
    total_steps: int | None = None
    stopped_early: str = ""
    doubts_plan: bool = False


def add_rows(
    runs: Runs,
    roles: Roles,
    name: str | None,
    rows: Iterable[Row],
    log: Path | str,
    errors: ReadErrors,
    *,
    may_name_runs: bool = False,
) -> None:
    """Add the values of rows to the run of this name, or to those that they name: each does without a name, some may
    with `may_name_runs`. What cannot be read is an error of the log.

    Some loggers write a step in several rows, some of them without the step, unless it is called `step`.
    """
    reached: dict[str, int] = {}
    for place, step, cells in rows:
        try:
            run = (
                name
                if name is not None and not (may_name_runs and "run" in cells)
                else parse_run_name(cells.get("run"))
            )
            step = cells.get(roles.step) if step is None else step
            if step is None and roles.step != "step":
                step = reached.get(run)
                if step is None:
                    continue
            reached[run] = parse_step(step)
            add_row(runs.run(run, roles), reached[run], cells)
        except ValueError as error:
            line = place if isinstance(place, int) else None
            errors.append(UnreadableInput(log, f"{place}: {error}" if isinstance(place, str) else str(error), line))


def parse_number(cell: object, column: str) -> float | None:
    """Parse a number, also as text, nan or inf; null and an empty text are None."""
    if type(cell) is float:
        return cell
    if cell is None or cell == "":
        return None
    try:
        if type(cell) is str or type(cell) is int:
            return float(cell)
    except (ValueError, OverflowError):
        if isinstance(cell, str) and cell.isspace():
            return None
    raise ValueError(f"{column} is {format_cell(cell)}; give a number, NaN, Infinity or -Infinity, or leave it out")


def check_stderr(value: float | None, role: MetricRole) -> float | None:
    """Check a standard error; NaN counts as missing."""
    if value is None or math.isnan(value):
        return None
    if value < 0 or math.isinf(value):
        raise ValueError(
            f"the standard error of {role} is {value:g}; give a finite number of at least 0, or leave it out"
        )
    return value


def parse_step(cell: object) -> int:
    """Parse a step: an integer, also as 10.0 or as text."""
    if type(cell) is int and 0 <= cell <= MAX_STEP:
        return cell
    number = cell
    if isinstance(cell, str):
        number = int(cell) if cell.strip().isdecimal() else parse_number(cell, "step")
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_STEP:
        return number
    raise ValueError(f"the step is {format_cell(cell)}; give a whole number from 0 to 2**53 - 1")


def parse_total_steps(cell: object) -> int:
    """Parse the planned length of a run: a positive integer."""
    try:
        steps = parse_step(cell)
    except ValueError:
        steps = 0
    if steps < 1:
        raise ValueError(
            f"{TOTAL_STEPS} is {format_cell(cell)}; give a whole number from 1 to 2**53 - 1, or leave it out"
        )
    return steps


def parse_gpus(cell: object) -> float | None:
    """Parse a column, label, parameter, tag or setting `gpus`; None if it is not a number of GPUs."""
    try:
        gpus = float(str(cell))
    except ValueError:
        return None
    return gpus if 0 <= gpus <= MOST_GPUS else None


def parse_run_name(cell: object) -> str:
    """Parse the name of a run: text or an integer."""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell)
    if isinstance(cell, str) and cell:
        return cell
    raise ValueError(f"the run is {format_cell(cell)}; give its name as text")


def format_cell(cell: object) -> str:
    """The cell for a message, shortened and escaped."""
    text = ascii(cell)
    return "missing" if cell is None else text if len(text) <= 60 else f"{text[:57]}..."
