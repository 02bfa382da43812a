"""`evalstop-lab cluster cost`: what stopping saves per month, in GPU-hours, GPUs and dollars."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import format_change, format_percent, new_table
from evalstop_lab.simulator import options, plots
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Cluster, Schedule, simulate_cluster
from evalstop_lab.simulator.execution import PUBLISHED, Iteration, simulate_mechanisms
from evalstop_lab.simulator.hidden import Hidden
from evalstop_lab.simulator.jobs import Floats, Workload
from evalstop_lab.simulator.metrics import Figures, measure_schedule
from evalstop_lab.simulator.paired import estimate_interval
from evalstop_lab.simulator.schedulers import SCHEDULERS, Scheduler
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import Stops, decide_stops, no_stops
from evalstop_lab.worlds.scoring import Figure

HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Prices:
    """Dollars per GPU-hour. Reserved GPUs are paid for even if unused; nodes are rented as a whole."""

    on_demand: float = 4.0
    spot: float = 1.6
    reserved: float = 2.4
    node_gpus: int = 8


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


def convert_to_dollars(prices: Prices, returned_gpu_hours: float, given_up_gpus: int) -> dict[str, float]:
    """Savings per month, by how the GPUs are paid for.

    On demand and spot: all saved hours. Reserved: only GPUs that can be given up, in whole nodes. Owned: 0, because
    they are paid for; only waiting times get shorter.
    """
    node_gpus = given_up_gpus // prices.node_gpus * prices.node_gpus
    return {
        "on demand": returned_gpu_hours * prices.on_demand,
        "spot": returned_gpu_hours * prices.spot,
        "reserved": node_gpus * HOURS_A_MONTH * prices.reserved,
        "owned": 0.0,
    }


SEEDS = 6
LONGEST_GROWTH = 10


@dataclass(frozen=True)
class Savings:
    """The savings of one seed's cluster under one policy, as shares of the jobs' GPU-hours without stops.

    `gpu_hours`: GPU-hours of jobs. `billed`: GPU-hours of whole nodes, which are more. Both include reruns of wrongly
    stopped jobs. `time`: the change of the mean completion time with the same jobs. `time_at_equal_load`: with as many
    more jobs as use the saved GPU-hours. `given_up`: GPUs that can be removed without a longer mean completion time.
    """

    policy: str
    gpu_hours: float
    billed: float
    time: float
    time_at_equal_load: float
    given_up: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cost` to `evalstop-lab cluster`."""
    parser = subparsers.add_parser("cost", help="savings per month, in GPU-hours, GPUs and dollars")
    options.add_common(parser, seeds=SEEDS)
    prices = Prices()
    options.add_world(parser)
    options.add_policies(parser)
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="SRTF-Est", help="(default: %(default)s)")
    for name in ("on_demand", "spot", "reserved"):
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
    parser.add_argument(
        "--length-growth",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="growth of hacking jobs' responses from the peak to the end of the plan (default: 0)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab cluster cost`; return its exit code."""
    prices = Prices(args.on_demand, args.spot, args.reserved, args.node_gpus)
    if min(prices.on_demand, prices.spot, prices.reserved) < 0:
        raise UnusableArguments("Prices must be 0 or more dollars per GPU-hour.")
    if not 0 <= args.length_growth <= LONGEST_GROWTH:
        raise UnusableArguments(f"--length-growth must be from 0 to {LONGEST_GROWTH}; 0.5 means 50 % longer.")
    setting = replace(options.get_setting(args), length_growth=args.length_growth)
    seeds, policies = options.get_seeds(args), options.get_policies(args)
    work = partial(_simulate_seed, setting, policies, args.scheduler, prices)
    by_seed = options.sweep_each(args, work, seeds, "simulating savings")
    savings = [item for of_seed in by_seed for item in of_seed]
    offered = setting.load * setting.gpus * HOURS_A_MONTH
    report = {
        "policies": {
            policy.name: _summarize([item for item in savings if item.policy == policy.name], offered, prices)
            for policy in policies
        },
        "executions": {
            kind: {name: asdict(factor) for name, factor in factors.items()}
            for kind, factors in (("mechanism", simulate_mechanisms(Iteration())), ("published", PUBLISHED))
        },
        "prices": asdict(prices),
        "scheduler": args.scheduler,
        "setting": options.encode_setting(setting, seeds),
    }
    return options.print_report(args, report, lambda console: _print_tables(console, report), plots.plot_cost)


def _simulate_seed(
    setting: Setting, policies: Sequence[Policy], scheduler_name: str, prices: Prices, seed: int
) -> list[Savings]:
    scheduler = SCHEDULERS[scheduler_name]
    jobs = draw_jobs(setting, seed)
    before, billed = _measure_stops(setting, jobs, no_stops(jobs[0]), scheduler, setting.gpus, prices)
    savings = []
    for policy in policies:
        stops = decide_stops(policy, jobs[0])
        after, billed_after = _measure_stops(setting, jobs, stops, scheduler, setting.gpus, prices)
        load_ratio = (after.gpu_hours + after.again) / before.gpu_hours
        more_jobs = draw_jobs(replace(setting, load=setting.load / load_ratio), seed)
        at_load, _ = _measure_stops(setting, more_jobs, stops, scheduler, setting.gpus, prices)
        savings.append(
            Savings(
                policy.name,
                gpu_hours=1 - load_ratio,
                billed=(billed - billed_after - after.again) / before.gpu_hours,
                time=after.jct / before.jct - 1,
                time_at_equal_load=at_load.jct / before.jct - 1,
                given_up=_count_spare_gpus(setting, jobs, stops, scheduler, before.jct, prices),
            )
        )
    return savings


def _measure_stops(
    setting: Setting, jobs: tuple[Workload, Hidden], stops: Stops, scheduler: Scheduler, gpus: int, prices: Prices
) -> tuple[Figures, float]:
    """The figures, and the GPU-hours of the running nodes."""
    workload, hidden = jobs
    cluster = Cluster(gpus, setting.restore_hours, setting.stop_hours)
    ends: Floats = stops.ends(workload, cluster)
    schedule = simulate_cluster(workload, scheduler, cluster, ends, evals=False)
    figures = measure_schedule(workload, hidden, stops, schedule, setting.measured)
    return figures, count_billed_hours(workload, schedule, prices.node_gpus)


def _count_spare_gpus(
    setting: Setting,
    jobs: tuple[Workload, Hidden],
    stops: Stops,
    scheduler: Scheduler,
    jct: float,
    prices: Prices,
) -> int:
    """The number of GPUs that can be removed before the mean time exceeds `jct`, by bisection."""
    least, most = int(jobs[0].gpus.max()), setting.gpus
    while least < most:
        middle = (least + most) // 2
        figures, _ = _measure_stops(setting, jobs, stops, scheduler, middle, prices)
        least, most = (least, middle) if figures.jct <= jct else (middle + 1, most)
    return setting.gpus - most


def _summarize(savings: Sequence[Savings], offered: float, prices: Prices) -> dict[str, Any]:
    shares = {
        name: estimate_interval(np.array([getattr(item, name) for item in savings]))
        for name in ("gpu_hours", "billed", "time", "time_at_equal_load", "given_up")
    }
    gpu_hours: Figure = shares["gpu_hours"]
    return {name: asdict(share) for name, share in shares.items()} | {
        "gpu_hours_a_month": gpu_hours.value * offered,
        "more_jobs_at_equal_load": 1 / (1 - gpu_hours.value) - 1,
        "dollars_a_month": convert_to_dollars(prices, shares["billed"].value * offered, int(shares["given_up"].value)),
    }


def _print_tables(console: Console, report: dict[str, Any]) -> None:
    console.print(_build_work_table(report))
    console.print(_build_dollar_table(report))
    console.print(
        "The model `mechanism` simulates only the mechanism, on drawn iterations: its figures differ from the papers'."
        " The model `published` uses the best ratio of each paper. Prices are parameters."
    )


def _build_work_table(report: dict[str, Any]) -> Table:
    table = new_table(
        f"savings, {report['scheduler']}",
        "policy",
        "GPU-hours saved, of all",
        "per month",
        "mean time",
        "more jobs at equal load",
        "mean time with more jobs",
        "GPUs to give up",
    )
    for name, figures in report["policies"].items():
        spare = figures["given_up"]
        table.add_row(
            name,
            format_change(figures["gpu_hours"]),
            f"{figures['gpu_hours_a_month']:,.0f}",
            format_change(figures["time"]),
            format_percent(figures["more_jobs_at_equal_load"], sign=True),
            format_change(figures["time_at_equal_load"]),
            f"{spare['value']:.1f} [{spare['low']:.1f}, {spare['high']:.1f}]",
        )
    return table


def _build_dollar_table(report: dict[str, Any]) -> Table:
    table = new_table(
        "dollars per month; owned GPUs save none, only waiting times get shorter",
        "policy",
        "model",
        "execution",
        "iteration time",
        "GPU time",
        "on demand",
        "spot",
        "reserved",
        "owned",
        left=3,
    )
    for name, figures in report["policies"].items():
        for kind, factors in report["executions"].items():
            for execution, factor in factors.items():
                dollars = [f"{amount * factor['gpu_time']:,.0f}" for amount in figures["dollars_a_month"].values()]
                table.add_row(name, kind, execution, f"{factor['time']:.2f}", f"{factor['gpu_time']:.2f}", *dollars)
    return table
