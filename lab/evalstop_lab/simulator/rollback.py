"""`evalstop-lab cluster rollback`: rather than stop a job, take it back to its best checkpoint and let it go on.

The job goes on from there with another setting (a stronger KL penalty, say), for what is left of its plan, and is
watched no more. Gao et al. (arXiv 2210.10760) found that a KL penalty moves a run along the same frontier of the eval
score and KL: what a second attempt adds to the eval score, `frontier_gain`, is 0 by their finding, and a parameter
here. What a rollback surely buys is cheap mistakes: a healthy job that was flagged loses the evals since its best one,
not all of its work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.report import format_change, format_percent, new_table
from evalstop_lab.simulator import options, plots
from evalstop_lab.simulator.drawing import draw
from evalstop_lab.simulator.engine import Cluster, simulate
from evalstop_lab.simulator.hidden import Hidden
from evalstop_lab.simulator.jobs import Floats, Workload
from evalstop_lab.simulator.metrics import measure
from evalstop_lab.simulator.paired import interval
from evalstop_lab.simulator.schedulers import SRTF_EST
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import Stops, decide, no_stops
from evalstop_lab.worlds.scoring import Figure

SEEDS = 6
ACTIONS = ("stop", "roll back")


@dataclass(frozen=True)
class Outcome:
    """Of one action under one policy. `gpu_hours` and `time` are changes beside no stops; after stops, what was stopped
    wrongly is run again. `eval_kept` is the eval score of the kept checkpoint of hacking jobs, as a share of
    what they could gain."""

    policy: str
    action: str
    gpu_hours: Figure
    time: Figure
    eval_kept: Figure


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `rollback` to `evalstop-lab cluster`."""
    parser = subparsers.add_parser("rollback", help="rather than stop, go back to the best checkpoint and go on")
    options.add(parser, seeds=SEEDS)
    options.add_world(parser)
    options.add_policies(parser)
    parser.add_argument(
        "--frontier-gain",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="what going on adds to the eval score (default: 0)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab cluster rollback`; return its exit code."""
    setting, seeds, policies = options.setting_of(args), options.seeds(args), options.policies_of(args)
    found = options.sweep_each(args, partial(_simulate, setting, policies, args.frontier_gain), seeds, "rolling back")
    outcomes = [
        Outcome(policy.name, action, *(interval(column) for column in np.array(of_seeds).T))
        for policy in policies
        for action in ACTIONS
        for of_seeds in [[of_seed[policy.name, action] for of_seed in found]]
    ]
    report = {
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "frontier_gain": args.frontier_gain,
        "setting": options.setting_document(setting, seeds),
    }
    return options.print_report(
        args, report, lambda console: _print(console, outcomes, args.frontier_gain), plots.rollback
    )


def rolled_back(workload: Workload, stops: Stops, cluster: Cluster) -> Floats:
    """After how many hours of running each job ends when flags take it back to its kept checkpoint, once."""
    ends = workload.hours
    for job, after, kept in zip(workload.jobs, stops.after.tolist(), stops.kept.tolist(), strict=True):
        if 0 < after < job.evals:
            ends[job.number] = job.eval_at(after) + cluster.restore_hours + job.hours - job.eval_at(kept)
    return ends


_Found = dict[tuple[str, str], tuple[float, float, float]]


def _simulate(setting: Setting, policies: Sequence[Policy], frontier_gain: float, seed: int) -> _Found:
    """By policy and action: the changes of GPU-hours and mean time, and the eval score."""
    workload, hidden = draw(setting, seed)
    cluster = Cluster(setting.gpus, setting.restore_hours, setting.stop_hours)

    def run_with(stops: Stops, ends: Floats) -> tuple[float, float, float]:
        schedule = simulate(workload, SRTF_EST, cluster, ends, evals=False)
        figures = measure(workload, hidden, stops, schedule, setting.measured)
        return figures.gpu_hours + figures.again, figures.jct, 1 - figures.eval_lost

    hours, time, _ = run_with(no_stops(workload), workload.hours)
    found: _Found = {}
    for policy in policies:
        stops = decide(policy, workload)
        for action, ends in zip(
            ACTIONS, (stops.ends(workload, cluster), rolled_back(workload, stops, cluster)), strict=True
        ):
            held, jct, eval_scores = run_with(stops, ends)
            added = frontier_gain * _taken_back(stops, hidden) if action == "roll back" else 0.0
            found[policy.name, action] = held / hours - 1, jct / time - 1, eval_scores + added
    return found


def _taken_back(stops: Stops, hidden: Hidden) -> float:
    """The share of hacking jobs that get a second attempt."""
    early = (stops.after > 0) & (stops.after < hidden.eval_scores.shape[1])
    return float(early[hidden.hacking].mean())


def _print(console: Console, outcomes: Sequence[Outcome], frontier_gain: float) -> None:
    table = new_table(
        f"beside no stops, SRTF-Est; going on adds {format_percent(frontier_gain, 0)} to the eval score",
        "policy",
        "action",
        "GPU-hours",
        "mean time",
        "the eval score kept by hacking jobs",
        left=2,
    )
    for outcome in outcomes:
        changes = (format_change(item) for item in (outcome.gpu_hours, outcome.time))
        table.add_row(outcome.policy, outcome.action, *changes, format_percent(outcome.eval_kept.value))
    console.print(table)
