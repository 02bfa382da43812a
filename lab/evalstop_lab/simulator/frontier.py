"""`evalstop-lab cluster frontier`: of what an oracle saves, how much does each rule save at how many false stops?

Two readings. The shipped policies as they are; and each detector with the threshold that stopped at most `RATE` of the
healthy jobs of other seeds of the same world, as `evalstop-lab calibrate --history` finds it on one's own runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from evalstop_detectors import DETECTORS, POLICIES, Detector, Member, Policy, Thresholds
from rich.console import Console

from evalstop_lab.calibrate.command import thresholds
from evalstop_lab.calibrate.evidence import Records, records
from evalstop_lab.report import format_percent, new_table
from evalstop_lab.simulator import options, plots
from evalstop_lab.simulator.drawing import draw
from evalstop_lab.simulator.metrics import Figures
from evalstop_lab.simulator.paired import interval
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import WORLDS, Setting
from evalstop_lab.simulator.stopping import logs
from evalstop_lab.simulator.study import CALIBRATION_SEED, NONE, ORACLE, Rows, cells
from evalstop_lab.worlds.scoring import Figure

SEEDS = 6
CALIBRATION_SEEDS = 3
JOBS = 600
RATE = 0.02
BASELINE = "SRTF-Est"
SHIPPED = ("paper", "default", "early")

TUNED: Mapping[str, dict[str, Any]] = {
    "k_decline": {},
    "ema_decline": {},
    "plateau_drop": {"sigmas": 1.5, "use_proxy": True},
    "cusum": {},
    "divergence": {},
    "e_process": {},
}
"""Detectors and their parameters: those of `default` for the one that it is made of."""


@dataclass(frozen=True)
class OperatingPoint:
    """One rule in one world. Shares of what the oracle saves are net: GPU-hours of false stops are taken off. `time`
    holds the share of the oracle's saving in mean time, by scheduler; `saved` is under `BASELINE`."""

    world: str
    rule: str
    threshold: float | None
    saved: Figure
    false_stops: Figure
    premature: float
    recall: float
    time: dict[str, Figure]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `frontier` to `evalstop-lab cluster`."""
    parser = subparsers.add_parser("frontier", help="the share of an oracle's saving that each rule reaches")
    options.add(parser, seeds=SEEDS)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), metavar="WORLD")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab cluster frontier`; return its exit code."""
    worlds = {name: replace(WORLDS[name], jobs=args.cluster_jobs or JOBS) for name in args.worlds}
    seeds = options.seeds(args)
    tuned = {name: tune(setting, args) for name, setting in worlds.items()}
    shipped = tuple(POLICIES[name] for name in SHIPPED)
    work = [
        cell
        for name, setting in worlds.items()
        for cell in cells({name: setting}, seeds, (*shipped, *tuned[name]), tuple(SCHEDULERS))
    ]
    rows = Rows(options.sweep_cells(args, work, "the frontier"))
    points = [measure_operating_point(rows, name, policy) for name in worlds for policy in (*shipped, *tuned[name])]
    report = {
        "points": [asdict(item) for item in points],
        "rate": RATE,
        "worlds": {name: options.setting_document(setting, seeds) for name, setting in worlds.items()},
    }
    return options.print_report(args, report, lambda console: _print(console, points), plots.frontier)


def tune(setting: Setting, args: argparse.Namespace) -> list[Policy]:
    """A policy of each detector, with the threshold that kept to `RATE` on calibration seeds."""
    found: dict[str, list[Records]] = {name: [] for name in TUNED}
    seeds = range(CALIBRATION_SEED, CALIBRATION_SEED + CALIBRATION_SEEDS)
    for of_seed in options.sweep_each(args, partial(_calibrate, setting), seeds, "calibrating"):
        for name, some in of_seed.items():
            found[name] += some
    policies = []
    for name, some in found.items():
        _, (limit,) = thresholds(some, [RATE])
        member = Member(_detector(name), Thresholds(None, limit.value))
        policies.append(Policy(f"{name} at {format_percent(RATE, 0)}", (member,), eval_required=False))
    return policies


def measure_operating_point(rows: Rows, world: str, policy: Policy) -> OperatingPoint:
    """Where the policy lies in this world."""
    counts = rows.counts(world, policy.name)
    limits = [member.thresholds.stop_at for member in policy.members]
    return OperatingPoint(
        world=world,
        rule=policy.name,
        threshold=limits[0] if policy.name not in SHIPPED else None,
        saved=_share(rows, world, policy.name, BASELINE, lambda found: found.wasted),
        false_stops=options.share(counts.wrong, counts.healthy),
        premature=counts.premature / counts.hacking,
        recall=counts.recall(late=False),
        time={name: _share(rows, world, policy.name, name, lambda found: found.jct) for name in SCHEDULERS},
    )


def _share(rows: Rows, world: str, rule: str, scheduler: str, figure: Callable[[Figures], float]) -> Figure:
    """Of what the oracle takes off this figure, the share that the rule takes off, seed by seed."""
    none, ours, best = (np.array(rows.numbers(world, who, scheduler, figure)) for who in (NONE, rule, ORACLE))
    return interval((none - ours) / (none - best))


def _calibrate(setting: Setting, seed: int) -> dict[str, list[Records]]:
    """What each detector makes of the healthy jobs of this seed."""
    workload, hidden = draw(setting, seed)
    detectors = {name: _detector(name) for name in TUNED}
    found: dict[str, list[Records]] = {name: [] for name in TUNED}
    roles = frozenset().union(*(detector.roles for detector in detectors.values()))
    for run, hacking in zip(logs(workload, roles), hidden.hacking.tolist(), strict=True):
        if not hacking:
            observations = run.observations()
            for name, detector in detectors.items():
                found[name].append(records(detector, observations))
    return found


def _detector(name: str) -> Detector[Any]:
    detector: Detector[Any] = msgspec.convert(TUNED[name], DETECTORS[name])
    return detector


def _print(console: Console, points: Sequence[OperatingPoint]) -> None:
    table = new_table(
        f"share of the oracle's saving in GPU-hours, false stops taken off ({BASELINE})",
        "world",
        "rule",
        "saved",
        "95 %",
        "false stops",
        "95 %",
        "recall",
        "too early",
        "mean time, of the oracle's",
        left=2,
    )
    for item in points:
        times = [share.value for share in item.time.values()]
        table.add_row(
            item.world,
            item.rule,
            format_percent(item.saved.value),
            f"{format_percent(item.saved.low)} to {format_percent(item.saved.high)}",
            format_percent(item.false_stops.value),
            f"{format_percent(item.false_stops.low)} to {format_percent(item.false_stops.high)}",
            format_percent(item.recall, 0),
            format_percent(item.premature),
            f"{format_percent(min(times), 0)} to {format_percent(max(times), 0)}",
        )
    console.print(table)
