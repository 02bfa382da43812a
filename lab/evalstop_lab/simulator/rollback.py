"""`evalstop-lab cluster rollback`: compares stopping a job with rolling it back to its best checkpoint.

A job that is rolled back resumes with other settings (a stronger KL penalty, for example) for the rest of its plan, and
is no longer watched. Gao et al. (arXiv 2210.10760) found that a KL penalty moves a run along the same curve of the eval
score over the KL; by their result the second attempt adds nothing to the eval score. `frontier_gain` is a parameter for
what it adds. The certain advantage of a rollback is that false stops cost less: a healthy job loses only the evals
since its best one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.report import format_figure, format_percent, new_table
from evalstop_lab.simulator import options
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.hidden import Hidden
from evalstop_lab.simulator.jobs import Floats, Workload
from evalstop_lab.simulator.metrics import measure_schedule
from evalstop_lab.simulator.schedulers import SRTF_EST
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import Stops, decide_stops, no_stops
from evalstop_lab.worlds.scoring import Figure, estimate_mean

SEEDS = 6
ACTIONS = ("stop", "roll back")


@dataclass(frozen=True)
class Outcome:
    """The result of one action under one policy. `gpu_hours`, `time`: changes relative to no stops; wrongly stopped
    jobs are run again. `eval_kept`: the eval score of the kept checkpoint of hacking jobs, as a share of their gain."""

    policy: str
    action: str
    gpu_hours: Figure
    time: Figure
    eval_kept: Figure


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "rollback", help="compare stopping a job with rolling it back to its best checkpoint"
    )
    options.add_common(parser, seeds=SEEDS)
    options.add_world(parser)
    options.add_policies(parser)
    parser.add_argument(
        "--frontier-gain",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share that the second attempt adds to the eval score (default: 0)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    setting, seeds, policies = options.get_setting(args), options.get_seeds(args), options.get_policies(args)
    work = partial(_simulate_seed, setting, policies, args.frontier_gain)
    by_seed = options.sweep_each(args, work, seeds, "simulating rollbacks")
    outcomes = [
        Outcome(policy.name, action, *(estimate_mean(column) for column in np.array(rows).T))
        for policy in policies
        for action in ACTIONS
        for rows in [[numbers[policy.name, action] for numbers in by_seed]]
    ]
    report = {
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "frontier_gain": args.frontier_gain,
        "setting": options.encode_setting(setting, seeds),
    }
    return options.print_report(args, report, lambda console: _print_table(console, outcomes, args.frontier_gain))


def roll_back(workload: Workload, stops: Stops, cluster: Cluster) -> Floats:
    """The hours of running after which each job ends, if its stop rolls it back to its kept checkpoint instead."""
    ends = workload.hours
    for job, after, kept_eval in zip(workload.jobs, stops.after.tolist(), stops.kept.tolist(), strict=True):
        if 0 < after < job.evals:
            ends[job.number] = job.eval_at(after) + cluster.restore_hours + job.hours - job.eval_at(kept_eval)
    return ends


_Numbers = dict[tuple[str, str], tuple[float, float, float]]


def _simulate_seed(setting: Setting, policies: Sequence[Policy], frontier_gain: float, seed: int) -> _Numbers:
    """The changes of GPU-hours and mean time, and the kept eval score, by policy and action."""
    workload, hidden = draw_jobs(setting, seed)
    cluster = setting.cluster

    def run_with(stops: Stops, ends: Floats) -> tuple[float, float, float]:
        schedule = simulate_cluster(workload, SRTF_EST, cluster, ends)
        figures = measure_schedule(workload, hidden, stops, schedule, setting.measured)
        return figures.gpu_hours + figures.again, figures.jct, 1 - figures.eval_lost

    hours, time, _ = run_with(no_stops(workload), workload.hours)
    numbers: _Numbers = {}
    for policy in policies:
        stops = decide_stops(policy, workload)
        for action, ends in zip(ACTIONS, (stops.ends(workload), roll_back(workload, stops, cluster)), strict=True):
            gpu_hours, jct, eval_kept = run_with(stops, ends)
            added = frontier_gain * _compute_retried_share(stops, hidden) if action == "roll back" else 0.0
            numbers[policy.name, action] = gpu_hours / hours - 1, jct / time - 1, eval_kept + added
    return numbers


def _compute_retried_share(stops: Stops, hidden: Hidden) -> float:
    """The share of hacking jobs that are rolled back."""
    early = (stops.after > 0) & (stops.after < hidden.eval_scores.shape[1])
    return float(early[hidden.hacking].mean())


def _print_table(console: Console, outcomes: Sequence[Outcome], frontier_gain: float) -> None:
    table = new_table(
        f"changes relative to no stops, SRTF-Est; a rollback adds {format_percent(frontier_gain, 0)} to the eval score",
        "policy",
        "action",
        "GPU-hours",
        "mean time",
        "kept eval score, hacking jobs",
        left=2,
    )
    for outcome in outcomes:
        changes = (format_figure(item, sign=True) for item in (outcome.gpu_hours, outcome.time))
        table.add_row(outcome.policy, outcome.action, *changes, format_percent(outcome.eval_kept.value))
    console.print(table)
