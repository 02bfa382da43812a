"""`evalstop-lab cluster frontier`: the share of an oracle's saving that each rule reaches, and its false stops.

The rules are the shipped policies, and each detector with the threshold that stopped at most `RATE` of the healthy jobs
of other seeds of the same world, as `evalstop-lab calibrate --history` calibrates it on past runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from evalstop_detectors import DETECTORS, POLICIES, Detector, Member, Policy, Thresholds
from rich.console import Console

from evalstop_lab.calibrate.evidence import Records, calibrate_thresholds, record_evidence
from evalstop_lab.report import format_figure, format_percent, new_table, save_figure
from evalstop_lab.simulator import study
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.metrics import Figures
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import WORLDS, Setting
from evalstop_lab.simulator.stopping import build_logs
from evalstop_lab.simulator.study import CALIBRATION_SEED, NONE, ORACLE, Rows, build_cells
from evalstop_lab.worlds.scoring import Figure, estimate_mean

SEEDS = 6
CALIBRATION_SEEDS = 3
JOBS = 600
RATE = 0.02
BASELINE = "SRTF-Est"
SHIPPED = ("paper", "default", "early")

TUNED: Mapping[str, dict[str, Any]] = {
    "k_decline": {},
    "plateau_drop": {"sigmas": 1.5, "use_proxy": True},
    "cusum": {},
    "divergence": {},
    "e_process": {},
}
"""The detectors, with their parameters that differ from the defaults."""


@dataclass(frozen=True)
class OperatingPoint:
    """The result of one rule in one world. `saved`: the share of the oracle's saving of GPU-hours under `BASELINE`, net
    of false stops. `time`: the share of the oracle's saving of mean time, by scheduler."""

    world: str
    rule: str
    threshold: float | None
    saved: Figure
    false_stops: Figure
    premature: float
    recall: float
    time: dict[str, Figure]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("frontier", help="measure the share of an oracle's saving that each rule reaches")
    study.add_common(parser, seeds=SEEDS)
    study.add_plots(parser)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), metavar="WORLD")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    worlds = {name: replace(WORLDS[name], jobs=args.cluster_jobs or JOBS) for name in args.worlds}
    seeds = study.get_seeds(args)
    tuned = {name: tune_detectors(setting, args) for name, setting in worlds.items()}
    shipped = tuple(POLICIES[name] for name in SHIPPED)
    work = [
        cell
        for name, setting in worlds.items()
        for cell in build_cells({name: setting}, seeds, (*shipped, *tuned[name]), tuple(SCHEDULERS))
    ]
    rows = Rows(study.sweep_cells(args, work, "simulating the frontier"))
    points = [measure_operating_point(rows, name, policy) for name in worlds for policy in (*shipped, *tuned[name])]
    report = {
        "points": [asdict(item) for item in points],
        "rate": RATE,
        "worlds": {name: study.encode_setting(setting, seeds) for name, setting in worlds.items()},
    }
    return study.print_report(args, report, lambda console: _print_table(console, points), _plot)


def tune_detectors(setting: Setting, args: argparse.Namespace) -> list[Policy]:
    """A policy per detector, with the threshold that stopped at most `RATE` of the jobs of calibration seeds."""
    by_detector: dict[str, list[Records]] = {name: [] for name in TUNED}
    seeds = range(CALIBRATION_SEED, CALIBRATION_SEED + CALIBRATION_SEEDS)
    for of_seed in study.sweep_each(args, partial(_record_evidence, setting), seeds, "calibrating"):
        for name, of_detector in of_seed.items():
            by_detector[name] += of_detector
    policies = []
    for name, of_detector in by_detector.items():
        _, (limit,) = calibrate_thresholds(of_detector, [RATE])
        member = Member(_make_detector(name), Thresholds(None, limit.value))
        policies.append(Policy(f"{name} at {format_percent(RATE, 0)}", (member,), eval_required=False))
    return policies


def measure_operating_point(rows: Rows, world: str, policy: Policy) -> OperatingPoint:
    """The figures of the policy in this world."""
    counts = rows.counts(world, policy.name)
    limits = [member.thresholds.stop_at for member in policy.members]
    return OperatingPoint(
        world=world,
        rule=policy.name,
        threshold=limits[0] if policy.name not in SHIPPED else None,
        saved=_estimate_share(rows, world, policy.name, BASELINE, lambda figures: figures.wasted),
        false_stops=counts.false_stops(late=False),
        premature=counts.premature / counts.hacking,
        recall=counts.recall(late=False).value,
        time={
            name: _estimate_share(rows, world, policy.name, name, lambda figures: figures.jct) for name in SCHEDULERS
        },
    )


def _estimate_share(rows: Rows, world: str, rule: str, scheduler: str, figure: Callable[[Figures], float]) -> Figure:
    """The rule's reduction of this figure as a share of the oracle's reduction, over seeds."""
    unstopped, policy_figures, oracle = (
        np.array(rows.numbers(world, name, scheduler, figure)) for name in (NONE, rule, ORACLE)
    )
    return estimate_mean((unstopped - policy_figures) / (unstopped - oracle))


def _record_evidence(setting: Setting, seed: int) -> dict[str, list[Records]]:
    """The evidence of each detector on the healthy jobs of this seed."""
    workload, hidden = draw_jobs(setting, seed)
    detectors = {name: _make_detector(name) for name in TUNED}
    evidence: dict[str, list[Records]] = {name: [] for name in TUNED}
    roles = frozenset().union(*(detector.roles for detector in detectors.values()))
    for run, hacking in zip(build_logs(workload, roles), hidden.hacking.tolist(), strict=True):
        if not hacking:
            observations, last = run.observations(), run.last_step
            for name, detector in detectors.items():
                evidence[name].append(record_evidence(detector, observations, last))
    return evidence


def _make_detector(name: str) -> Detector[Any]:
    detector: Detector[Any] = msgspec.convert(TUNED[name], DETECTORS[name])
    return detector


def _print_table(console: Console, points: Sequence[OperatingPoint]) -> None:
    title = f"share of the oracle's saving of GPU-hours, net of false stops ({BASELINE})"
    headings = ("saved", "false stops", "recall", "premature", "share of its saving of mean time")
    table = new_table(title, "world", "rule", *headings, left=2)
    for item in points:
        times = [share.value for share in item.time.values()]
        shares = f"{format_percent(min(times), 0)} to {format_percent(max(times), 0)}"
        figures = (format_figure(item.saved), format_figure(item.false_stops), format_percent(item.recall, 0))
        table.add_row(item.world, item.rule, *figures, format_percent(item.premature), shares)
    console.print(table)


def _plot(folder: Path, report: dict[str, Any]) -> None:
    """Write frontier.png: the share of the oracle's saving against false stops, one panel per world."""
    worlds = list(report["worlds"])
    columns = min(len(worlds), 4)
    rows = -(-len(worlds) // columns)
    with save_figure(folder / "frontier.png", (3.4 * columns, 3.1 * rows), rows, columns, sharey=True) as axes:
        for axis, world in zip(axes.flat, worlds, strict=False):
            points = [item for item in report["points"] if item["world"] == world]
            for number, item in enumerate(points):
                shipped = item["threshold"] is None
                saved, false = item["saved"], max(item["false_stops"]["value"], 1e-3)
                error = [[saved["value"] - saved["low"]], [saved["high"] - saved["value"]]]
                mark = {"marker": "s" if shipped else "o", "markersize": 6, "color": f"C{number % 10}", "capsize": 2}
                axis.errorbar([false], [max(saved["value"], 0.0)], yerr=error, linestyle="", label=item["rule"], **mark)
            axis.axvline(report["rate"], color="#999999", linewidth=0.8)
            axis.set(xscale="log", title=world, ylim=(-0.03, 1.0))
        for axis in axes[-1]:
            axis.set_xlabel("false stops per healthy job")
        for axis in axes[:, 0]:
            axis.set_ylabel("share of the oracle's saving")
        axes[0, 0].figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
