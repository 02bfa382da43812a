"""`evalstop-lab cluster cost` and `cadence`: what stopping saves a month, and how often to evaluate.

More evals find the turn sooner but cost GPU-hours in every job, including healthy ones. Savings are relative to a
cluster without stops (`cadence`: and without evals); a job that was stopped wrongly is run again to its end.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import format_figure, format_percent, new_table
from evalstop_lab.simulator import study
from evalstop_lab.simulator.drawing import Hidden, draw_jobs
from evalstop_lab.simulator.engine import Schedule, simulate_cluster
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.metrics import Figures, measure_schedule
from evalstop_lab.simulator.schedulers import SRTF_EST
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import Stops, decide_stops, no_stops
from evalstop_lab.worlds.scoring import estimate_mean, wilson

HOURS_A_MONTH = 730.0
EVALS = (5, 10, 20, 30, 50, 100)
COSTS = (0.0, 0.0005, 0.001, 0.002, 0.005)


@dataclass(frozen=True)
class Prices:
    """Dollars per GPU-hour; nodes are rented as a whole."""

    on_demand: float = 4.0
    spot: float = 1.6
    node_gpus: int = 8


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("cost", help="savings per month, in GPU-hours and dollars")
    study.add_common(parser, seeds=6)
    study.add_world(parser)
    study.add_policies(parser)
    for name in ("on_demand", "spot"):
        text = "price of a GPU-hour (default: %(default)s)"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=getattr(Prices, name), metavar="DOLLARS", help=text)
    parser.add_argument(
        "--node-gpus", type=positive_number, default=Prices.node_gpus, help="GPUs per node (default: %(default)s)"
    )
    parser.set_defaults(run=run_cost)
    parser = subparsers.add_parser("cadence", help="compare numbers of evals per job, given the cost of an eval")
    study.add_common(parser, seeds=4)
    study.add_world(parser)
    study.add_policies(parser)
    parser.add_argument("--evals", nargs="+", type=positive_number, default=list(EVALS), help="evals per job")
    parser.add_argument(
        "--costs", nargs="+", type=float, default=list(COSTS), metavar="SHARE", help="eval durations, of a job's hours"
    )
    parser.set_defaults(run=run_cadence)


def run_cost(args: argparse.Namespace) -> int:
    """Run `evalstop-lab cluster cost`; return its exit code."""
    prices = Prices(args.on_demand, args.spot, args.node_gpus)
    if min(prices.on_demand, prices.spot) < 0:
        raise UnusableArguments("Prices must be 0 or more dollars per GPU-hour.")
    setting, seeds, policies = study.get_setting(args), study.get_seeds(args), study.get_policies(args)
    work = partial(_simulate_savings, setting, policies, prices.node_gpus)
    rows = study.estimate_figures(
        study.sweep_each(args, work, seeds, "simulating savings"), ("policy",), ("gpu_hours", "billed", "time")
    )
    offered = setting.load * setting.gpus * HOURS_A_MONTH  # the GPU-hours that the jobs of a month need
    report = {
        "policies": {row.pop("policy"): row | _price_month(row, offered, prices) for row in rows},
        "prices": asdict(prices),
        "setting": study.encode_setting(setting, seeds),
    }
    return study.print_report(args, report, lambda console: _print_costs(console, report))


def _price_month(row: dict[str, Any], offered: float, prices: Prices) -> dict[str, Any]:
    billed = row["billed"]["value"] * offered
    dollars = {"on demand": billed * prices.on_demand, "spot": billed * prices.spot}
    return {"gpu_hours_a_month": row["gpu_hours"]["value"] * offered, "dollars_a_month": dollars}


def count_billed_hours(workload: Workload, schedule: Schedule, node_gpus: int) -> float:
    """GPU-hours of the running nodes: at any time as many as the GPUs in use need, with optimal packing."""
    if not schedule.spells:
        return 0.0
    job, since, until = zip(*schedule.spells, strict=True)
    gpus = workload.gpus[list(job)]
    times = np.concatenate([since, until])
    order = np.argsort(times, kind="stable")
    used = np.cumsum(np.concatenate([gpus, -gpus])[order])[:-1]
    return float((np.ceil(used / node_gpus) * node_gpus * np.diff(times[order])).sum())


def _simulate_stops(setting: Setting, workload: Workload, hidden: Hidden, stops: Stops) -> tuple[Figures, Schedule]:
    schedule = simulate_cluster(workload, SRTF_EST, setting.cluster, stops.ends(workload))
    return measure_schedule(workload, hidden, stops, schedule, setting.measured), schedule


def _simulate_savings(
    setting: Setting, policies: Sequence[Policy], node_gpus: int, seed: int
) -> dict[tuple[str], tuple[float, float, float]]:
    """By policy: the GPU-hours of jobs saved, those of whole nodes, which are more, both as shares of the jobs'
    GPU-hours without stops and with reruns of wrongly stopped jobs; and the change of the mean completion time."""
    workload, hidden = draw_jobs(setting, seed)
    before, schedule = _simulate_stops(setting, workload, hidden, no_stops(workload))
    billed = count_billed_hours(workload, schedule, node_gpus)
    savings = {}
    for policy in policies:
        after, schedule = _simulate_stops(setting, workload, hidden, decide_stops(policy, workload))
        billed_less = billed - count_billed_hours(workload, schedule, node_gpus) - after.again
        hours = 1 - (after.gpu_hours + after.again) / before.gpu_hours
        savings[(policy.name,)] = hours, billed_less / before.gpu_hours, after.jct / before.jct - 1
    return savings


def _print_costs(console: Console, report: dict[str, Any]) -> None:
    headings = ("GPU-hours saved, of all", "per month", "dollars per month, on demand", "spot", "mean time")
    caption = "owned and reserved GPUs save no dollars, only waiting times get shorter"
    table = new_table(f"savings, {SRTF_EST.name}", "policy", *headings, caption=caption)
    for name, figures in report["policies"].items():
        table.add_row(
            name,
            format_figure(figures["gpu_hours"], sign=True),
            f"{figures['gpu_hours_a_month']:,.0f}",
            *(f"{dollars:,.0f}" for dollars in figures["dollars_a_month"].values()),
            format_figure(figures["time"], sign=True),
        )
    console.print(table)


def run_cadence(args: argparse.Namespace) -> int:
    """Run `evalstop-lab cluster cadence`; return its exit code."""
    if min(args.costs) < 0 or max(args.costs) >= 1:
        raise UnusableArguments("An eval costs a share of its job's hours: give --costs from 0 up to 1, such as 0.002.")
    setting, seeds, policies = study.get_setting(args), study.get_seeds(args), study.get_policies(args)
    work = [(evals, seed) for evals in args.evals for seed in seeds]
    simulate = partial(_simulate_cadence, setting, policies, args.costs)
    numbers = dict(zip(work, study.sweep_each(args, simulate, work, "simulating cadences"), strict=True))
    nets = []
    for policy in policies:
        for cost in args.costs:
            for evals in args.evals:
                rows = np.array([numbers[evals, seed][policy.name, cost] for seed in seeds])
                wrong = wilson(int(rows[:, 2].sum()), int(rows[:, 3].sum()))
                figures = {"saved": estimate_mean(rows[:, 0]), "time": estimate_mean(rows[:, 1]), "false_stops": wrong}
                key = {"policy": policy.name, "evals": evals, "eval_share": cost}
                nets.append(key | {name: asdict(figure) for name, figure in figures.items()})
    report = {"nets": nets, "world": args.world, "setting": study.encode_setting(setting, seeds)}
    return study.print_report(args, report, lambda console: _print_cadences(console, nets, args))


def _simulate_cadence(
    setting: Setting, policies: Sequence[Policy], costs: Sequence[float], evals_and_seed: tuple[int, int]
) -> dict[tuple[str, float], tuple[float, float, int, int]]:
    """By policy and cost: the share of GPU-hours saved, net of evals and reruns, the change of the mean time (NaN if
    evals fill the cluster, so that it would grow with the trace), false stops and healthy jobs."""
    evals, seed = evals_and_seed
    setting = replace(setting, evals=evals)
    workload, hidden = draw_jobs(setting, seed)
    stops = {policy.name: decide_stops(policy, workload) for policy in policies}
    before, _ = _simulate_stops(setting, workload, hidden, no_stops(workload))
    numbers = {}
    for cost in costs:
        dearer, _ = draw_jobs(replace(setting, eval_share=cost), seed)
        for name, of_policy in stops.items():
            after, _ = _simulate_stops(setting, dearer, hidden, of_policy)
            wrong = ~hidden.hacking & (of_policy.ends(dearer) < dearer.hours)
            is_overloaded = setting.load * (1 + setting.evals * cost) >= 1
            time = math.nan if is_overloaded else after.jct / before.jct - 1
            saved = 1 - (after.gpu_hours + after.again) / before.gpu_hours
            numbers[name, cost] = saved, time, int(wrong.sum()), int((~hidden.hacking).sum())
    return numbers


def _print_cadences(console: Console, nets: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    for policy in dict.fromkeys(net["policy"] for net in nets):
        title = f"{policy}, world {args.world}: share of all GPU-hours saved; * marks the best cadence"
        table = new_table(title, "cost per eval", *(f"{evals} evals" for evals in args.evals))
        for cost in args.costs:
            row = [net for net in nets if (net["policy"], net["eval_share"]) == (policy, cost)]
            best = max(row, key=lambda net: net["saved"]["value"])
            cells = (format_percent(net["saved"]["value"], sign=True) + (" *"[net is best]) for net in row)
            table.add_row(format_percent(cost, 2), *cells)
        free = [net for net in nets if (net["policy"], net["eval_share"]) == (policy, args.costs[0])]
        table.add_row("false stops", *(f"{format_percent(net['false_stops']['value'])} " for net in free))
        console.print(table)
