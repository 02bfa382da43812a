"""Reads a cluster's log of jobs: a CSV with the time of submission, the duration and the GPUs of each.

Columns have names such as `submit_time`, or those of Philly's log and its derivatives. The duration is a column or the
difference of start and end. Times are seconds, or dates such as 2017-10-03 08:15:00; durations are seconds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.lines import NumberedLines
from evalstop_lab.simulator.jobs import Floats, Integers

SUBMITTED = ("submit_time", "submitted_time", "submitted", "submission_time")
DURATION = ("duration", "duration_seconds", "run_time", "runtime")
STARTED, ENDED = ("start_time", "started"), ("end_time", "finish_time", "finished_time", "ended")
GPUS = ("gpus", "num_gpus", "num_gpu", "gpu_num", "gpu_count")

_SECONDS_AN_HOUR = 3600.0
_EMPTY = frozenset({"", "none", "null", "nan"})


@dataclass(frozen=True, eq=False)
class Trace:
    """Jobs in order of submission; times are hours from the first submission. `skipped`: the number of rows of jobs
    without GPUs, or that never started or ended."""

    submitted: Floats
    hours: Floats
    gpus: Integers
    skipped: int


def read_trace(path: Path) -> Trace:
    """Read the log; raises UnreadableInput with file, line and what was expected."""
    numbered = NumberedLines(path)
    rows = csv.reader(numbered, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    header: dict[str, int] | None = None
    jobs: list[tuple[float, float, int]] = []
    skipped = 0
    try:
        for cells in rows:
            if header is None:
                header = _parse_header(cells)
            elif len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells where the header has {len(header)}; quote cells with commas")
            elif (job := _parse_job({name: cells[place] for name, place in header.items()})) is None:
                skipped += 1
            else:
                jobs.append(job)
    except (ValueError, csv.Error) as error:
        raise UnreadableInput(path, str(error), numbered.number) from error
    if not jobs:
        raise UnreadableInput(path, "it has no job that ran on GPUs; give a CSV with one row per job")
    jobs.sort(key=lambda job: job[0])
    seconds = np.array([job[0] for job in jobs])
    return Trace(
        (seconds - seconds[0]) / _SECONDS_AN_HOUR,
        np.array([job[1] for job in jobs]) / _SECONDS_AN_HOUR,
        np.array([job[2] for job in jobs], dtype=np.int64),
        skipped,
    )


def _parse_header(cells: list[str]) -> dict[str, int]:
    header = {cell.strip().lower(): place for place, cell in enumerate(cells)}
    if len(header) < len(cells):
        raise ValueError("the header has a column twice; name each column once")
    for quantity, names in (("the time of submission", SUBMITTED), ("the GPUs", GPUS)):
        if not any(name in header for name in names):
            others = ", ".join(names[1:])
            raise ValueError(f"the header has no column with {quantity}; name it {names[0]} (or {others})")
    spans = any(name in header for name in STARTED) and any(name in header for name in ENDED)
    if not spans and not any(name in header for name in DURATION):
        raise ValueError("the header needs a column `duration`, or both of start_time and end_time")
    return header


def _parse_job(row: Mapping[str, str]) -> tuple[float, float, int] | None:
    """Submission and duration in seconds, and GPUs; None for a row that is not a GPU job."""
    submitted, gpus = _parse_time(row, SUBMITTED), _parse_number(row, GPUS)
    seconds = _parse_number(row, DURATION)
    if seconds is None:
        started, ended = _parse_time(row, STARTED), _parse_time(row, ENDED)
        seconds = None if started is None or ended is None else ended - started
    if submitted is None or not gpus or seconds is None or seconds <= 0:
        return None
    if gpus < 0 or not gpus.is_integer():
        raise ValueError(f"a job has {gpus:g} GPUs; give a non-negative integer")
    return submitted, seconds, int(gpus)


def _get_cell(row: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    for name in names:
        if name in row:
            cell = row[name].strip()
            return None if cell.lower() in _EMPTY else cell
    return None


def _parse_number(row: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    cell = _get_cell(row, names)
    if cell is None:
        return None
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{cell[:60]!r} is not a number")
    return number


def _parse_time(row: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    cell = _get_cell(row, names)
    if cell is None:
        return None
    try:
        return float(cell)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        raise ValueError(f"{cell[:60]!r} is not a time; give seconds, or a date such as 2017-10-03 08:15:00") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
