"""`evalstop-lab cluster trace FILE`: what stopping would save on the recorded jobs of a real cluster.

The log has the submission, duration and GPUs of jobs. What it lacks (which jobs were hacking, and their evals) is drawn
from a world, over several seeds.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import format_figure, format_percent, new_table
from evalstop_lab.simulator import options
from evalstop_lab.simulator.drawing import Requests, add_evals, draw_estimates, draw_kinds
from evalstop_lab.simulator.paired import compare_paired
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import WORLDS, Setting
from evalstop_lab.simulator.study import NONE, ORACLE, Row, Rows, simulate_rules
from evalstop_lab.simulator.trace_file import Trace, read_trace
from evalstop_lab.worlds.scoring import Figure, estimate_mean

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
    options.add_common(parser, seeds=SEEDS)
    parser.add_argument(
        "--gpus", type=positive_number, help=f"GPUs of the cluster (default: enough for a load of {FULLEST:g})"
    )
    options.add_world(parser)
    options.add_policies(parser)
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
    seeds, policies = options.get_seeds(args), options.get_policies(args)
    work = partial(_simulate_seed, trace, setting, policies, tuple(args.schedulers))
    by_seed = options.sweep_each(args, work, seeds, f"simulating {args.file.name}")
    rows = Rows([row for of_seed in by_seed for row in of_seed])
    rules = [*(policy.name for policy in policies), ORACLE]
    report = {
        "jobs": len(trace.gpus),
        "skipped": trace.skipped,
        "gpus": gpus,
        "load": compute_load(trace, gpus),
        "results": {name: {rule: _summarize(rows, rule, name) for rule in rules} for name in args.schedulers},
        "setting": options.encode_setting(setting, seeds),
    }
    return options.print_report(args, report, lambda console: _print_table(console, report))


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
    return simulate_rules("trace", setting, seed, add_evals(setting, seed, requests), policies, schedulers)


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
