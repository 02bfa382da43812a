"""`evalstop-lab cluster`: reproduces the table of EvalStop (arXiv 2606.04145), on seeds not used for
fitting.

The unit of work is one seed of one world, so that results do not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import add

import numpy as np
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.report import format_figure, format_percent, new_table
from evalstop_lab.simulator.drawing import PAPER, Setting, draw_jobs, stop_at_peaks
from evalstop_lab.simulator.engine import simulate_cluster
from evalstop_lab.simulator.metrics import Counts, Figures, count_flags, measure_schedule
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.stopping import compute_ends, decide_stops
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds.scoring import Figure, estimate_mean

NONE, ORACLE = "none", "oracle"
SEEDS, REPORTING_SEED = 12, 30_000
JOBS = 3000
BASELINE = "SRTF-Est"
COUNTED_ON = "FIFO-Skip"  # the cheapest scheduler, for settings in which only flags are counted
FEWER = 5  # those settings have this factor fewer jobs
COMPARED = ("paper", "default", "fixed-progress", "loss-plateau")
STOPPING = (*COMPARED, ORACLE)
NOISES = (0.01, 0.02, 0.03, 0.04, 0.05)
HACKING = (0.2, 0.35, 0.5, 0.65, 0.8)
TOLERANCE = 0.02


@dataclass(frozen=True)
class Cell:
    """One seed of one world, and the rules and schedulers to simulate in addition to no stops and the oracle.

    `world`: the name of the world in the rows.
    """

    world: str
    setting: Setting
    seed: int
    rules: Sequence[str]
    schedulers: Sequence[str]


@dataclass(frozen=True)
class Row:
    """The result of one seed under one rule and one scheduler; the counts depend only on the rule."""

    world: str
    rule: str
    scheduler: str
    figures: Figures
    counts: Counts


def run_cell(cell: Cell) -> list[Row]:
    """Draw the cell's jobs once, let each rule decide once, and simulate each scheduler under each rule."""
    workload, hidden = draw_jobs(cell.setting, cell.seed)
    never = np.zeros(len(workload.jobs), dtype=np.int64)
    decided = {NONE: (never, workload.hours), ORACLE: stop_at_peaks(workload, hidden)}
    for rule in cell.rules:
        stops = decide_stops(rule, workload)
        decided[rule] = stops, compute_ends(workload, stops)
    rows = []
    for name, (stops, ends) in decided.items():
        counts = count_flags(workload, hidden, stops)
        for scheduler in cell.schedulers:
            schedule = simulate_cluster(workload, SCHEDULERS[scheduler], cell.setting.cluster, ends)
            figures = measure_schedule(workload, hidden, schedule, cell.setting.measured)
            rows.append(Row(cell.world, name, scheduler, figures, counts))
    return rows


class Rows:
    """Rows by world, rule and scheduler, the seeds in order."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            self._rows.setdefault((row.world, row.rule, row.scheduler), []).append(row)

    def numbers(self, world: str, rule: str, scheduler: str, figure: str) -> list[float]:
        """This figure, one value per seed."""
        return [getattr(row.figures, figure) for row in self._rows[world, rule, scheduler]]

    def counts(self, world: str, rule: str) -> Counts:
        rows = next(rows for (of_world, by, _), rows in self._rows.items() if (of_world, by) == (world, rule))
        return reduce(add, (row.counts for row in rows))


@dataclass(frozen=True)
class Line:
    """One figure of the paper and ours; `bound`: whether the paper states a value ("=") or a limit (">=", "<")."""

    what: str
    paper: float
    bound: str
    ours: Figure

    @property
    def matches(self) -> bool:
        """Whether ours is within two percentage points of the value, or within the limit."""
        if self.bound == ">=":
            return self.ours.value >= self.paper
        if self.bound == "<":
            return self.ours.value < self.paper
        return abs(self.ours.value - self.paper) <= TOLERANCE + 1e-9


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=positive_number, default=SEEDS, help=f"number of seeds (default: {SEEDS})")
    parser.add_argument(
        "--first-seed",
        type=whole_number,
        default=REPORTING_SEED,
        help="the first seed (default: seeds not used for fitting)",
    )
    parser.add_argument(
        "--cluster-jobs", type=positive_number, default=JOBS, metavar="JOBS", help="number of jobs per seed"
    )
    add_jobs_option(parser)


def run(args: argparse.Namespace) -> int:
    cells = build_cells(replace(PAPER, jobs=args.cluster_jobs), range(args.first_seed, args.first_seed + args.seeds))
    rows = Rows(chain.from_iterable(sweep(run_cell, cells, "reproducing", args.jobs)))
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(_build_paper_table(build_lines(rows)), _build_rules_table(rows), sep="\n")
    return 0


def build_lines(rows: Rows) -> list[Line]:
    """The paper's figures and ours."""
    counts = rows.counts("paper", "paper")
    fixed, loss = rows.counts("paper", "fixed-progress"), rows.counts("paper", "loss-plateau")
    times = {name: _compare_paper(rows, name, "jct") for name in SCHEDULERS}
    return [
        Line("precision", 0.98, "=", counts.precision()),
        Line("recall", 0.99, "=", counts.recall()),
        Line("false stops of healthy jobs", 0.015, "=", counts.false_stops()),
        Line(f"mean time to completion, {BASELINE}", -0.09, "=", times[BASELINE]),
        Line(f"wasted GPU-hours, {BASELINE}", -0.22, "=", _compare_paper(rows, BASELINE, "wasted")),
        Line(
            "mean time, scheduler with the smallest gain", -0.09, "=", max(times.values(), key=lambda item: item.value)
        ),
        Line(
            "mean time, scheduler with the largest gain", -0.25, "=", min(times.values(), key=lambda item: item.value)
        ),
        Line("lowest precision, noise up to 0.05", 0.91, ">=", _find_least_precision(rows, map(_name_noise, NOISES))),
        Line(
            "lowest precision, 20 to 80 % hacking", 0.89, ">=", _find_least_precision(rows, map(_name_share, HACKING))
        ),
        Line("fixed progress: false stops", 0.65, "=", fixed.false_stops()),
        Line("loss plateau: recall", 0.5, "<", loss.recall()),
    ]


def build_cells(setting: Setting, seeds: Sequence[int]) -> list[Cell]:
    fewer = replace(setting, jobs=math.ceil(setting.jobs / FEWER))
    worlds = {_name_noise(sd): replace(fewer, noise_sd=sd) for sd in NOISES}
    worlds |= {_name_share(share): replace(fewer, hacking_share=share) for share in HACKING}
    cells = [Cell("paper", setting, seed, COMPARED, tuple(SCHEDULERS)) for seed in seeds]
    cells += [Cell(name, world, seed, ("paper",), (COUNTED_ON,)) for name, world in worlds.items() for seed in seeds]
    return cells


def _name_noise(sd: float) -> str:
    return f"noise {sd:g}"


def _name_share(share: float) -> str:
    return f"hacking {share:g}"


def _compare_paper(rows: Rows, scheduler: str, figure: str) -> Figure:
    """The mean of the seeds' relative changes of a figure by the paper's rule."""
    before, after = (np.array(rows.numbers("paper", name, scheduler, figure)) for name in (NONE, "paper"))
    return estimate_mean(after / before - 1)


def _find_least_precision(rows: Rows, worlds: Iterable[str]) -> Figure:
    return min((rows.counts(world, "paper").precision() for world in worlds), key=lambda item: item.value)


def estimate_saving(rows: Rows, rule: str) -> Figure:
    """The GPU-hours that the rule saves under the baseline, net of false stops, as a share of the oracle's saving."""
    unstopped, ours, oracle = (
        np.array(rows.numbers("paper", name, BASELINE, "wasted")) for name in (NONE, rule, ORACLE)
    )
    return estimate_mean((unstopped - ours) / (unstopped - oracle))


def _build_paper_table(lines: Sequence[Line]) -> Table:
    title = "the paper's table (with flags at the last eval)"
    table = new_table(title, "", "paper", "ours", "within 2 points")
    for line in lines:
        paper = f"{'' if line.bound == '=' else line.bound + ' '}{format_percent(line.paper)}"
        table.add_row(line.what, paper, format_figure(line.ours), "yes" if line.matches else "no")
    return table


def _build_rules_table(rows: Rows) -> Table:
    title = "flags, with / without those at the last eval, which save nothing"
    table = new_table(title, "rule", "precision", "recall", "false stops", "premature", "saved, of the oracle's")
    for rule in STOPPING:
        counts = rows.counts("paper", rule)
        both = [
            f"{format_percent(share().value)} / {format_percent(share(late=False).value)}"
            for share in (counts.precision, counts.recall, counts.false_stops)
        ]
        premature = format_percent(counts.premature / counts.hacking)
        table.add_row(rule, *both, premature, format_figure(estimate_saving(rows, rule)))
    return table
