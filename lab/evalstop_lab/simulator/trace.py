"""`evalstop-lab cluster trace FILE`: what stopping would save on the recorded jobs of a real cluster.

The log has the submission, duration and GPUs of jobs. What it lacks (which jobs were hacking, and their evals) is drawn
from a world, over several seeds.

The log is a CSV; columns have names such as `submit_time`, or those of Philly's log. The duration, in seconds, is
a column or the difference of start and end. Times are seconds, or dates such as 2017-10-03 08:15:00.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay.lines import NumberedLines
from evalstop_lab.report import format_figure, format_percent, new_table
from evalstop_lab.simulator import study
from evalstop_lab.simulator.drawing import Requests, add_evals, draw_estimates, draw_kinds
from evalstop_lab.simulator.jobs import Floats, Integers
from evalstop_lab.simulator.metrics import compare_paired
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import WORLDS, Setting
from evalstop_lab.simulator.study import NONE, ORACLE, Cell, Row, Rows, simulate_rules
from evalstop_lab.worlds.scoring import Figure, estimate_mean

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
    number = math.nan
    if cell is not None:
        with suppress(ValueError):
            number = float(cell)
        if not math.isfinite(number):
            raise ValueError(f"{cell[:60]!r} is not a number")
    return None if cell is None else number


def _parse_time(row: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    cell = _get_cell(row, names)
    if cell is None:
        return None
    with suppress(ValueError):
        return float(cell)
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        raise ValueError(f"{cell[:60]!r} is not a time; give seconds, or a date such as 2017-10-03 08:15:00") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


SEEDS = 4
NODE = 8
FULLEST = 0.85


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("trace", help="measure the savings on a real cluster's log of jobs, a CSV file")
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="CSV with submit_time, duration (seconds) and gpus of each job, or Philly's columns",
    )
    study.add_common(parser, seeds=SEEDS)
    parser.add_argument(
        "--gpus", type=positive_number, help=f"GPUs of the cluster (default: enough for a load of {FULLEST:g})"
    )
    study.add_world(parser)
    study.add_policies(parser)
    parser.add_argument("--schedulers", nargs="+", choices=SCHEDULERS, default=["FIFO", "SRTF-Est", "2D-LAS"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.cluster_jobs is not None:
        raise UnusableArguments("The jobs of a trace are those in its file; leave out --cluster-jobs.")
    trace = read_trace(args.file)
    gpus = args.gpus or find_cluster_size(trace)
    if gpus < trace.gpus.max():
        raise UnusableArguments(f"A job of the trace needs {trace.gpus.max()} GPUs; --gpus must be at least as many.")
    setting = replace(WORLDS[args.world], gpus=gpus, jobs=len(trace.gpus), measured=(0.0, 1.0))
    seeds, policies = study.get_seeds(args), study.get_policies(args)
    work = partial(_simulate_seed, trace, setting, policies, tuple(args.schedulers))
    by_seed = study.sweep_each(args, work, seeds, f"simulating {args.file.name}")
    rows = Rows([row for of_seed in by_seed for row in of_seed])
    rules = [*(policy.name for policy in policies), ORACLE]
    report = {
        "jobs": len(trace.gpus),
        "skipped": trace.skipped,
        "gpus": gpus,
        "load": compute_load(trace, gpus),
        "results": {name: {rule: _summarize(rows, rule, name) for rule in rules} for name in args.schedulers},
        "setting": study.encode_setting(setting, seeds),
    }
    return study.print_report(args, report, lambda console: _print_table(console, report))


def find_cluster_size(trace: Trace) -> int:
    """The smallest cluster of whole nodes that fits the largest job and is not overloaded."""
    gpus = math.ceil(int(trace.gpus.max()) / NODE) * NODE
    while compute_load(trace, gpus) > FULLEST:
        gpus += NODE
    return gpus


def compute_load(trace: Trace, gpus: int) -> float:
    """The ratio of requested to available GPU-hours, from the first submission to the last, or for the longest job."""
    span = max(float(trace.submitted[-1]), float(trace.hours.max()))
    return float((trace.hours * trace.gpus).sum()) / (span * gpus)


def _simulate_seed(
    trace: Trace, setting: Setting, policies: tuple[Policy, ...], schedulers: tuple[str, ...], seed: int
) -> list[Row]:
    estimates = draw_estimates(setting, seed, trace.hours)
    kinds = draw_kinds(setting, seed, len(trace.gpus))
    requests = Requests(trace.submitted, trace.gpus, trace.hours, estimates, kinds)
    return simulate_rules(Cell("trace", setting, seed, policies, schedulers), add_evals(setting, seed, requests))


def _summarize(rows: Rows, rule: str, scheduler: str) -> dict[str, Any]:
    before, after = (rows.figures("trace", name, scheduler) for name in (NONE, rule))
    times = compare_paired([item.jct for item in before], [item.jct for item in after])
    saved: Figure = estimate_mean(
        [1 - (new.gpu_hours + new.again) / old.gpu_hours for old, new in zip(before, after, strict=True)]
    )
    return {
        "mean_hours_before": sum(item.jct for item in before) / len(before),
        "time": asdict(times.change),
        "gpu_hours_saved": asdict(saved),
        "false_stops": asdict(rows.counts("trace", rule).false_stops(late=False)),
    }


def _print_table(console: Console, report: dict[str, Any]) -> None:
    title = (
        f"{report['jobs']:,} jobs on {report['gpus']:,} GPUs, load {report['load']:.2f};"
        f" {report['skipped']:,} rows without a GPU job skipped"
    )
    headings = ("mean hours without stops", "mean time", "GPU-hours saved", "false stops")
    table = new_table(title, "scheduler", "rule", *headings, left=2)
    for scheduler, rules in report["results"].items():
        for rule, figures in rules.items():
            cells = [format_figure(figures[name], sign=True) for name in ("time", "gpu_hours_saved")]
            before, wrong = f"{figures['mean_hours_before']:.2f}", format_percent(figures["false_stops"]["value"])
            table.add_row(scheduler, rule, before, *cells, wrong)
    console.print(table)
