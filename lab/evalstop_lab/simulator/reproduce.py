"""`evalstop-lab cluster`: reproduces the table of EvalStop (arXiv 2606.04145), on seeds not used for
fitting.

A seed is worked on in one process, so that results do not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

import numpy as np
from numpy.typing import NDArray
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
FEWER = 5  # settings in which only flags are counted have this factor fewer jobs
COMPARED = ("paper", "default", "fixed-progress", "loss-plateau")
STOPPING = (*COMPARED, ORACLE)
NOISES = (0.01, 0.02, 0.03, 0.04, 0.05)
HACKING = (0.2, 0.35, 0.5, 0.65, 0.8)
TOLERANCE = 0.02


@dataclass(frozen=True)
class Seed:
    """The jobs of one seed: their flags by rule, and the figures by rule and scheduler, also without a rule."""

    counts: Mapping[str, Counts]
    figures: Mapping[tuple[str, str], Figures]


def simulate_seed(setting: Setting, rules: Sequence[str], schedulers: Sequence[str], seed: int) -> Seed:
    """Draw the jobs once, let each rule and the oracle decide once, and simulate each scheduler under each."""
    workload, hidden = draw_jobs(setting, seed)
    decided = {NONE: (np.zeros(len(workload.jobs), dtype=np.int64), workload.hours)}
    decided[ORACLE] = stop_at_peaks(workload, hidden)
    for rule in rules:
        stops = decide_stops(rule, workload)
        decided[rule] = stops, compute_ends(workload, stops)
    figures = {}
    for name, (_, ends) in decided.items():
        for scheduler in schedulers:
            schedule = simulate_cluster(workload, SCHEDULERS[scheduler], setting.cluster, ends)
            figures[name, scheduler] = measure_schedule(workload, hidden, schedule, setting.measured)
    return Seed({name: count_flags(workload, hidden, stops) for name, (stops, _) in decided.items()}, figures)


def count_paper_flags(setting: Setting, seeds: Sequence[int]) -> Counts:
    """The flags of the paper's rule over these seeds."""
    fewer = replace(setting, jobs=math.ceil(setting.jobs / FEWER))
    drawn = (draw_jobs(fewer, seed) for seed in seeds)
    return reduce(add, (count_flags(workload, hidden, decide_stops("paper", workload)) for workload, hidden in drawn))


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
    numbers = range(args.first_seed, args.first_seed + args.seeds)
    setting = replace(PAPER, jobs=args.cluster_jobs)
    simulate = partial(simulate_seed, setting, COMPARED, tuple(SCHEDULERS))
    seeds = sweep(simulate, numbers, "simulating", args.jobs)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    lines = build_lines(seeds, count_worlds(setting, numbers, args.jobs))
    console.print(_build_paper_table(lines), _build_rules_table(seeds), sep="\n")
    return 0


def count_worlds(setting: Setting, seeds: Sequence[int], jobs: int = 1) -> dict[str, list[Counts]]:
    """The flags of the paper's rule in worlds with other noise, and with other shares of hacking."""
    noise = [replace(setting, noise_sd=sd) for sd in NOISES]
    shares = [replace(setting, hacking_share=share) for share in HACKING]
    counts = sweep(partial(count_paper_flags, seeds=seeds), [*noise, *shares], "counting flags", jobs)
    return {"noise": counts[: len(noise)], "share": counts[len(noise) :]}


def build_lines(seeds: Sequence[Seed], worlds: Mapping[str, Sequence[Counts]]) -> list[Line]:
    """The paper's figures and ours."""
    counts = _sum_counts(seeds, "paper")
    fixed, loss = _sum_counts(seeds, "fixed-progress"), _sum_counts(seeds, "loss-plateau")
    times = {name: _compare_paper(seeds, name, "jct") for name in SCHEDULERS}
    smallest, largest = (choose(times.values(), key=lambda item: item.value) for choose in (max, min))
    lowest = {
        name: min((item.precision() for item in varied), key=lambda item: item.value) for name, varied in worlds.items()
    }
    return [
        Line("precision", 0.98, "=", counts.precision()),
        Line("recall", 0.99, "=", counts.recall()),
        Line("false stops of healthy jobs", 0.015, "=", counts.false_stops()),
        Line(f"mean time to completion, {BASELINE}", -0.09, "=", times[BASELINE]),
        Line(f"wasted GPU-hours, {BASELINE}", -0.22, "=", _compare_paper(seeds, BASELINE, "wasted")),
        Line("mean time, scheduler with the smallest gain", -0.09, "=", smallest),
        Line("mean time, scheduler with the largest gain", -0.25, "=", largest),
        Line("lowest precision, noise up to 0.05", 0.91, ">=", lowest["noise"]),
        Line("lowest precision, 20 to 80 % hacking", 0.89, ">=", lowest["share"]),
        Line("fixed progress: false stops", 0.65, "=", fixed.false_stops()),
        Line("loss plateau: recall", 0.5, "<", loss.recall()),
    ]


def _sum_counts(seeds: Sequence[Seed], rule: str) -> Counts:
    return reduce(add, (seed.counts[rule] for seed in seeds))


def _list_figures(seeds: Sequence[Seed], rule: str, scheduler: str, figure: str) -> NDArray[np.float64]:
    """This figure, one value per seed."""
    return np.array([getattr(seed.figures[rule, scheduler], figure) for seed in seeds])


def _compare_paper(seeds: Sequence[Seed], scheduler: str, figure: str) -> Figure:
    """The mean of the seeds' relative changes of a figure by the paper's rule."""
    before, after = (_list_figures(seeds, rule, scheduler, figure) for rule in (NONE, "paper"))
    return estimate_mean(after / before - 1)


def estimate_saving(seeds: Sequence[Seed], rule: str) -> Figure:
    """The GPU-hours that the rule saves under the baseline, net of false stops, as a share of the oracle's saving."""
    unstopped, ours, oracle = (_list_figures(seeds, name, BASELINE, "wasted") for name in (NONE, rule, ORACLE))
    return estimate_mean((unstopped - ours) / (unstopped - oracle))


def _build_paper_table(lines: Sequence[Line]) -> Table:
    title = "the paper's table (with flags at the last eval)"
    table = new_table(title, "", "paper", "ours", "within 2 points")
    for line in lines:
        paper = f"{'' if line.bound == '=' else line.bound + ' '}{format_percent(line.paper)}"
        table.add_row(line.what, paper, format_figure(line.ours), "yes" if line.matches else "no")
    return table


def _build_rules_table(seeds: Sequence[Seed]) -> Table:
    title = "flags, with / without those at the last eval, which save nothing"
    table = new_table(title, "rule", "precision", "recall", "false stops", "premature", "saved, of the oracle's")
    for rule in STOPPING:
        counts = _sum_counts(seeds, rule)
        both = [
            f"{format_percent(share().value)} / {format_percent(share(late=False).value)}"
            for share in (counts.precision, counts.recall, counts.false_stops)
        ]
        premature = format_percent(counts.premature / counts.hacking)
        table.add_row(rule, *both, premature, format_figure(estimate_saving(seeds, rule)))
    return table
