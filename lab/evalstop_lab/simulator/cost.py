"""`evalstop-lab cluster cost`: what stopping saves per month, in GPU-hours and dollars."""

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
from evalstop_lab.simulator import options
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Schedule, simulate_cluster
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.metrics import Figures, measure_schedule
from evalstop_lab.simulator.schedulers import SRTF_EST
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import Stops, decide_stops, no_stops
from evalstop_lab.worlds.scoring import estimate_mean

HOURS_A_MONTH = 730.0
SEEDS = 6


@dataclass(frozen=True)
class Prices:
    """Dollars per GPU-hour; nodes are rented as a whole."""

    on_demand: float = 4.0
    spot: float = 1.6
    node_gpus: int = 8


@dataclass(frozen=True)
class Savings:
    """The savings of one seed's cluster under one policy, as shares of the jobs' GPU-hours without stops.

    `gpu_hours`: GPU-hours of jobs. `billed`: GPU-hours of whole nodes, which are more. Both include reruns of wrongly
    stopped jobs. `time`: the change of the mean completion time.
    """

    policy: str
    gpu_hours: float
    billed: float
    time: float


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


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("cost", help="savings per month, in GPU-hours and dollars")
    options.add_common(parser, seeds=SEEDS)
    prices = Prices()
    options.add_world(parser)
    options.add_policies(parser)
    for name in ("on_demand", "spot"):
        default = getattr(prices, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=default,
            metavar="DOLLARS",
            help=f"price of a GPU-hour (default: {default})",
        )
    parser.add_argument(
        "--node-gpus", type=positive_number, default=prices.node_gpus, help="GPUs per node (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prices = Prices(args.on_demand, args.spot, args.node_gpus)
    if min(prices.on_demand, prices.spot) < 0:
        raise UnusableArguments("Prices must be 0 or more dollars per GPU-hour.")
    setting, seeds, policies = options.get_setting(args), options.get_seeds(args), options.get_policies(args)
    work = partial(_simulate_seed, setting, policies, prices.node_gpus)
    by_seed = options.sweep_each(args, work, seeds, "simulating savings")
    savings = [item for of_seed in by_seed for item in of_seed]
    offered = setting.load * setting.gpus * HOURS_A_MONTH
    report = {
        "policies": {
            policy.name: _summarize([item for item in savings if item.policy == policy.name], offered, prices)
            for policy in policies
        },
        "prices": asdict(prices),
        "setting": options.encode_setting(setting, seeds),
    }
    return options.print_report(args, report, lambda console: _print_table(console, report))


def _simulate_seed(setting: Setting, policies: Sequence[Policy], node_gpus: int, seed: int) -> list[Savings]:
    workload, hidden = draw_jobs(setting, seed)
    cluster = setting.cluster

    def measure_stops(stops: Stops) -> tuple[Figures, float]:
        """The figures, and the GPU-hours of the running nodes."""
        ends = stops.ends(workload)
        schedule = simulate_cluster(workload, SRTF_EST, cluster, ends)
        figures = measure_schedule(workload, hidden, stops, schedule, setting.measured)
        return figures, count_billed_hours(workload, schedule, node_gpus)

    before, billed = measure_stops(no_stops(workload))
    savings = []
    for policy in policies:
        after, billed_after = measure_stops(decide_stops(policy, workload))
        savings.append(
            Savings(
                policy.name,
                gpu_hours=1 - (after.gpu_hours + after.again) / before.gpu_hours,
                billed=(billed - billed_after - after.again) / before.gpu_hours,
                time=after.jct / before.jct - 1,
            )
        )
    return savings


def _summarize(savings: Sequence[Savings], offered: float, prices: Prices) -> dict[str, Any]:
    """The mean savings, and those per month if jobs need `offered` GPU-hours per month."""
    shares = {
        name: estimate_mean([getattr(item, name) for item in savings]) for name in ("gpu_hours", "billed", "time")
    }
    billed_hours = shares["billed"].value * offered
    return {name: asdict(share) for name, share in shares.items()} | {
        "gpu_hours_a_month": shares["gpu_hours"].value * offered,
        "dollars_a_month": {"on demand": billed_hours * prices.on_demand, "spot": billed_hours * prices.spot},
    }


def _print_table(console: Console, report: dict[str, Any]) -> None:
    table = new_table(
        f"savings, {SRTF_EST.name}",
        "policy",
        "GPU-hours saved, of all",
        "per month",
        "dollars per month, on demand",
        "spot",
        "mean time",
        caption="owned and reserved GPUs save no dollars, only waiting times get shorter",
    )
    for name, figures in report["policies"].items():
        table.add_row(
            name,
            format_figure(figures["gpu_hours"], sign=True),
            f"{figures['gpu_hours_a_month']:,.0f}",
            *(f"{dollars:,.0f}" for dollars in figures["dollars_a_month"].values()),
            format_figure(figures["time"], sign=True),
        )
    console.print(table)
