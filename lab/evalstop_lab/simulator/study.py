"""What the subcommands of `evalstop-lab cluster` share: options, the simulation of many clusters, and reports.

The unit of work is one seed of one world: its jobs are drawn once, each rule decides once, and every scheduler runs
under each rule. So results depend neither on the number of workers nor on the other rules.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.replay.policy_file import load_policy
from evalstop_lab.report import to_json_values
from evalstop_lab.simulator.drawing import Hidden, draw_jobs, stop_at_peaks
from evalstop_lab.simulator.engine import simulate_cluster
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.metrics import Counts, Figures, count_flags, measure_schedule
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import WORLDS, Setting
from evalstop_lab.simulator.stopping import Rule, decide_stops, no_stops
from evalstop_lab.sweep import BACKENDS, LOCAL, add_jobs_option, sweep
from evalstop_lab.worlds.scoring import estimate_mean

Item = TypeVar("Item")
Result = TypeVar("Result")

POLICIES = ("paper", "default", "early")
NONE, ORACLE = "none", "oracle"
CALIBRATION_SEED, REPORTING_SEED = 0, 30_000


def add_common(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument("--seeds", type=positive_number, default=seeds, help=f"number of seeds (default: {seeds})")
    parser.add_argument("--first-seed", type=whole_number, help="the first seed (default: seeds not used for fitting)")
    parser.add_argument("--cluster-jobs", type=positive_number, metavar="JOBS", help="number of jobs per seed")
    add_jobs_option(parser)
    parser.add_argument("--backend", choices=BACKENDS, default=LOCAL, help="where to compute (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def add_plots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write a plot to this folder")


def add_world(parser: argparse.ArgumentParser, worlds: Mapping[str, Setting] = WORLDS, default: str = "paper") -> None:
    """Add `--world`, from which jobs are drawn."""
    description = "world from which jobs are drawn (default: %(default)s)"
    parser.add_argument("--world", choices=worlds, default=default, help=description)


def add_policies(parser: argparse.ArgumentParser) -> None:
    description = f"policies to simulate (default: {' '.join(POLICIES)})"
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME|FILE", help=description)


def get_setting(args: argparse.Namespace, worlds: Mapping[str, Setting] = WORLDS) -> Setting:
    """The requested world, with the requested number of jobs."""
    setting = worlds[args.world]
    return replace(setting, jobs=args.cluster_jobs or setting.jobs)


def get_policies(args: argparse.Namespace) -> tuple[Policy, ...]:
    return tuple(load_policy(name) for name in args.policies)


def get_seeds(args: argparse.Namespace) -> list[int]:
    """The requested seeds, else those not used for fitting."""
    start = REPORTING_SEED if args.first_seed is None else args.first_seed
    return list(range(start, start + args.seeds))


def sweep_each(
    args: argparse.Namespace, work: Callable[[Item], Result], items: Sequence[Item], title: str
) -> list[Result]:
    """Apply `work` to each item, with a progress bar, in the requested processes or cluster."""
    return sweep(work, items, title, args.jobs, chunk=1, backend=args.backend)


def estimate_figures(
    by_seed: Sequence[Mapping[Any, Sequence[float]]], names: Sequence[str], figures: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each key of the seeds' numbers: its parts under these names, and the mean of each figure over seeds."""
    rows = []
    for key in by_seed[0]:
        columns = np.array([of_seed[key] for of_seed in by_seed]).T
        means = {name: asdict(estimate_mean(column)) for name, column in zip(figures, columns, strict=True)}
        rows.append(dict(zip(names, key, strict=True)) | means)
    return rows


def print_report(
    args: argparse.Namespace,
    report: dict[str, Any],
    show: Callable[[Console], None],
    draw: Callable[[Path, dict[str, Any]], None] | None = None,
) -> int:
    """Print the report in the requested format, and write its plot, if it has one; returns the exit code."""
    if draw is not None and args.plots is not None:
        args.plots.mkdir(parents=True, exist_ok=True)
        draw(args.plots, report)
    if args.json:
        sys.stdout.write(json.dumps(to_json_values(report)) + "\n")
    else:
        show(Console() if sys.stdout.isatty() else Console(width=180))
    return 0


def encode_setting(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """The parameters of a world as JSON values."""
    offered = {kind.value: asdict(item) for kind, item in setting.offered.items()}
    numbers = {name: getattr(setting, name) for name in setting.__dataclass_fields__ if name != "offered"}
    return numbers | {"offered": offered, "seeds": [seeds[0], seeds[-1]]}


@dataclass(frozen=True)
class Cell:
    """One seed of one world, and the policies and schedulers to simulate in addition to no stops and the oracle.
    `world`: the name of the world in the rows."""

    world: str
    setting: Setting
    seed: int
    policies: tuple[Rule, ...]
    schedulers: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """The result of one cell under one rule and one scheduler; the counts depend only on the rule."""

    world: str
    seed: int
    rule: str
    scheduler: str
    figures: Figures
    counts: Counts


def build_cells(
    worlds: Mapping[str, Setting], seeds: Sequence[int], policies: Sequence[Rule], schedulers: Sequence[str]
) -> list[Cell]:
    """Every seed of every world, with these policies and schedulers."""
    return [
        Cell(name, setting, seed, tuple(policies), tuple(schedulers))
        for name, setting in worlds.items()
        for seed in seeds
    ]


def sweep_cells(args: argparse.Namespace, cells: Sequence[Cell], title: str) -> list[Row]:
    return [row for rows in sweep_each(args, run_cell, cells, title) for row in rows]


def run_cell(cell: Cell) -> list[Row]:
    return simulate_rules(cell, draw_jobs(cell.setting, cell.seed))


def simulate_rules(cell: Cell, jobs: tuple[Workload, Hidden]) -> list[Row]:
    """Simulate these jobs under no stops, the oracle and each policy, by each scheduler."""
    workload, hidden = jobs
    unstopped = no_stops(workload)
    decided = {NONE: (unstopped, unstopped.ends(workload)), ORACLE: stop_at_peaks(workload, hidden)}
    for policy in cell.policies:
        stops = decide_stops(policy, workload)
        decided[policy.name] = stops, stops.ends(workload)
    rows = []
    for rule, (stops, ends) in decided.items():
        counts = count_flags(workload, hidden, stops)
        for name in cell.schedulers:
            schedule = simulate_cluster(workload, SCHEDULERS[name], cell.setting.cluster, ends)
            figures = measure_schedule(workload, hidden, stops, schedule, cell.setting.measured)
            rows.append(Row(cell.world, cell.seed, rule, name, figures, counts))
    return rows


class Rows:
    """Rows by world, rule and scheduler, the seeds in order."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows: dict[tuple[str, str, str], list[Row]] = {}
        for row in sorted(rows, key=lambda item: item.seed):
            self._rows.setdefault((row.world, row.rule, row.scheduler), []).append(row)

    def figures(self, world: str, rule: str, scheduler: str) -> list[Figures]:
        return [row.figures for row in self._rows[world, rule, scheduler]]

    def numbers(self, world: str, rule: str, scheduler: str, figure: Callable[[Figures], float]) -> list[float]:
        """This figure, one value per seed."""
        return [figure(item) for item in self.figures(world, rule, scheduler)]

    def counts(self, world: str, rule: str) -> Counts:
        rows = next(rows for (of_world, by, _), rows in self._rows.items() if (of_world, by) == (world, rule))
        total = rows[0].counts
        for row in rows[1:]:
            total = total + row.counts
        return total
