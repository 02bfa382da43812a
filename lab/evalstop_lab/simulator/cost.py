"""`evalstop-lab cluster cost`: what stopping saves a month, relative to a cluster without stops.

A job that was stopped wrongly is run again to its end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import format_figure, new_table
from evalstop_lab.simulator import study
from evalstop_lab.simulator.drawing import Hidden, draw_jobs
from evalstop_lab.simulator.engine import Schedule, simulate_cluster
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.metrics import Figures, measure_schedule
from evalstop_lab.simulator.schedulers import SRTF_EST
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import Stops, decide_stops, no_stops

HOURS_A_MONTH = 730.0


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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
