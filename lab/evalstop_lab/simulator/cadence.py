"""`evalstop-lab cluster cadence`: how often to evaluate, given the cost of an eval.

More evals find the turn sooner but cost GPU-hours in every job, including healthy ones. Savings are relative to a
cluster without evals and stops; a job that was stopped wrongly is run again to its end.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import format_percent, new_table
from evalstop_lab.simulator import options
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import simulate_cluster
from evalstop_lab.simulator.metrics import measure_schedule
from evalstop_lab.simulator.schedulers import SRTF_EST
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import decide_stops, no_stops
from evalstop_lab.worlds.scoring import Figure, estimate_mean, wilson

SEEDS = 4
EVALS = (5, 10, 20, 30, 50, 100)
COSTS = (0.0, 0.0005, 0.001, 0.002, 0.005)


@dataclass(frozen=True)
class Net:
    """The result of one policy at one cadence and cost: one eval takes `eval_share` of a job's hours.

    `saved` is the share of all GPU-hours that is saved, net of evals and of reruns; `time` is the change of the mean
    time to completion; NaN if evals fill the cluster, so that it would grow with the trace.
    """

    policy: str
    evals: int
    eval_share: float
    saved: Figure
    time: Figure
    false_stops: Figure


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("cadence", help="compare numbers of evals per job, given the cost of an eval")
    options.add_common(parser, seeds=SEEDS)
    options.add_world(parser)
    options.add_policies(parser)
    parser.add_argument("--evals", nargs="+", type=positive_number, default=list(EVALS), help="evals per job")
    parser.add_argument(
        "--costs", nargs="+", type=float, default=list(COSTS), metavar="SHARE", help="eval durations, of a job's hours"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if min(args.costs) < 0 or max(args.costs) >= 1:
        raise UnusableArguments("An eval costs a share of its job's hours: give --costs from 0 up to 1, such as 0.002.")
    setting, seeds, policies = options.get_setting(args), options.get_seeds(args), options.get_policies(args)
    work = [(evals, seed) for evals in args.evals for seed in seeds]
    results = options.sweep_each(
        args, partial(_simulate_seed, setting, policies, args.costs), work, "simulating cadences"
    )
    nets = _summarize(dict(zip(work, results, strict=True)), policies, args.costs, args.evals, seeds)
    report = {
        "nets": [asdict(net) for net in nets],
        "world": args.world,
        "setting": options.encode_setting(setting, seeds),
    }
    return options.print_report(args, report, lambda console: _print_tables(console, nets, policies, args))


_Numbers = dict[tuple[str, float], tuple[float, float, int, int]]


def _simulate_seed(
    setting: Setting, policies: Sequence[Policy], costs: Sequence[float], evals_and_seed: tuple[int, int]
) -> _Numbers:
    """The share of GPU-hours saved, the change of the mean time, false stops and healthy jobs, by policy and cost."""
    evals, seed = evals_and_seed
    setting = replace(setting, evals=evals)
    cluster = setting.cluster
    workload, hidden = draw_jobs(setting, seed)
    stops = {policy.name: decide_stops(policy, workload) for policy in policies}
    before = measure_schedule(
        workload, hidden, no_stops(workload), simulate_cluster(workload, SRTF_EST, cluster), setting.measured
    )
    numbers: _Numbers = {}
    for cost in costs:
        dearer, _ = draw_jobs(replace(setting, eval_share=cost), seed)
        for name, of_policy in stops.items():
            ends = of_policy.ends(dearer)
            schedule = simulate_cluster(dearer, SRTF_EST, cluster, ends)
            after = measure_schedule(dearer, hidden, of_policy, schedule, setting.measured)
            saved = 1 - (after.gpu_hours + after.again) / before.gpu_hours
            wrong = ~hidden.hacking & (ends < dearer.hours)
            is_overloaded = setting.load * (1 + setting.evals * cost) >= 1
            time = math.nan if is_overloaded else after.jct / before.jct - 1
            numbers[name, cost] = saved, time, int(wrong.sum()), int((~hidden.hacking).sum())
    return numbers


def _summarize(
    numbers: dict[tuple[int, int], _Numbers],
    policies: Sequence[Policy],
    costs: Sequence[float],
    evals: Sequence[int],
    seeds: Sequence[int],
) -> list[Net]:
    nets = []
    for policy in policies:
        for cost in costs:
            for count in evals:
                rows = np.array([numbers[count, seed][policy.name, cost] for seed in seeds])
                wrong = wilson(int(rows[:, 2].sum()), int(rows[:, 3].sum()))
                saved, time = estimate_mean(rows[:, 0]), estimate_mean(rows[:, 1])
                nets.append(Net(policy.name, count, cost, saved, time, wrong))
    return nets


def _print_tables(console: Console, nets: Sequence[Net], policies: Sequence[Policy], args: argparse.Namespace) -> None:
    for policy in policies:
        title = f"{policy.name}, world {args.world}: share of all GPU-hours saved; * marks the best cadence"
        table = new_table(title, "cost per eval", *(f"{evals} evals" for evals in args.evals))
        for cost in args.costs:
            row = [net for net in nets if (net.policy, net.eval_share) == (policy.name, cost)]
            best = max(row, key=lambda net: net.saved.value)
            table.add_row(
                format_percent(cost, 2),
                *(f"{format_percent(net.saved.value, sign=True)}{'*' if net is best else ' '}" for net in row),
            )
        free = [net for net in nets if (net.policy, net.eval_share) == (policy.name, args.costs[0])]
        table.add_row("false stops", *(f"{format_percent(net.false_stops.value)} " for net in free))
        console.print(table)
