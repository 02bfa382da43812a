"""`make bench-detection`: how well detectors and policies find the turn, compared with published rules and an oracle.

Thresholds are calibrated on calibration seeds and families, where half of the runs report their planned length. Figures
are those of StopBench, on reporting seeds, which include held-out families. There all runs report their planned length,
and 15 % of the plans are wrong. Policies and the detectors that use the planned length are also evaluated without it,
and on the second suite, whose author knew neither detectors nor families.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from evalstop_detectors import BestCheckpoint, Score, Scores, choose_best, find_highest
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.detection.contenders import AS_SHIPPED, STATED, Contender, list_contenders
from evalstop_lab.calibrate.command import HEALTHY, PLANNED_SHARE
from evalstop_lab.calibrate.evidence import Records, calibrate_thresholds
from evalstop_lab.report import format_number, format_percent, list_versions, new_table, print_suite, to_json_values
from evalstop_lab.stopbench.judging import BOUND_ERROR, compute_figures, keep_highest
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds import (
    HELD_OUT,
    LEVELS,
    REPORTING_SEED,
    World,
    add_planned_steps,
    draw_world,
    load_recorded_runs,
    plan_worlds,
    second_suite,
)
from evalstop_lab.worlds.scoring import Outcome, compute_eval_loss, estimate_mean

QUICK_RUNS = 60
SECOND_SUITE_SEED = REPORTING_SEED + 2_000_000
RECORDED = Path("tests/data/rlhf_runs_public.jsonl")
RATES = (0.01, 0.05)
CHOOSERS = {"raw_maximum": find_highest, "smoothed_maximum": choose_best}

Draw = Callable[[str, int], World]
Point = tuple[str, float, float]
"""A name, the alarm level at which a contender stops, and the error of the tests that it is compared with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its tables, and write the report to a folder."""
    parser = argparse.ArgumentParser(
        prog="make bench-detection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calibration-runs", type=positive_number, default=1600, help="healthy calibration runs (default: 1600)"
    )
    parser.add_argument(
        "--runs", type=positive_number, default=2000, help="reporting runs, half hacking (default: 2000)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contenders by the start of their names (default: all)"
    )
    parser.add_argument("--recorded", type=Path, default=RECORDED, metavar="FILE", help=f"recorded runs ({RECORDED})")
    parser.add_argument("--folder", type=Path, default=Path("bench-detection"), help="for the report (%(default)s)")
    add_jobs_option(parser)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_RUNS} runs of each kind; the figures are not representative"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if options.quick:
        options.calibration_runs = options.runs = QUICK_RUNS
    report = measure_contenders(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps(to_json_values(report))
    (options.folder / "report.json").write_text(document + "\n", encoding="utf-8")
    if options.json:
        sys.stdout.write(document + "\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=220)
    for name, result in report["suites"].items():
        print_suite(console, name, result)
    _print_noise_tables(console, report)
    console.print(f"Wrote report.json (also by noise and family) to {options.folder}/")
    return 0


def measure_contenders(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of each contender at each of its points, by suite, and the losses of chosen checkpoints."""
    contenders = [
        item for item in list_contenders() if options.only is None or any(item.name.startswith(n) for n in options.only)
    ]
    compared = [item for item in contenders if item.compared]
    calibrated = [item for item in contenders if item.calibrated]
    reported, kinds = plan_worlds(options.runs, REPORTING_SEED), list(second_suite.SECOND_SUITE)
    drawn = [(kinds[index % len(kinds)], SECOND_SUITE_SEED + index) for index in range(options.runs)]
    healthy = plan_worlds(options.calibration_runs, families=HEALTHY)
    calibrating = _record_worlds(calibrated, healthy, _draw_half_planned, "calibrating", options.jobs)
    points = {
        item.name: find_thresholds(item, [row[item.name] for row in calibrating if item.calibrated])
        for item in contenders
    }
    suites: dict[str, dict[str, Any]] = {}
    for title, among, recipes, draw in (
        ("reporting", contenders, reported, _draw_planned),
        ("unknown length", compared, reported, draw_world),
        ("second suite", compared, drawn, second_suite.draw_world),
    ):
        rows = _record_worlds(among, recipes, draw, title, options.jobs)
        if among:
            suites[title] = _compute_suite(among, points, [draw(*recipe) for recipe in recipes], rows)
    if options.recorded.exists():
        recorded = [replace(run, planned_steps=float(run.steps[-1])) for run in load_recorded_runs(options.recorded)]
        rows = [_record_world(contenders, world) for world in recorded]
        suites["recorded"] = _compute_suite(contenders, points, recorded, rows)
    setting = {name: getattr(options, name) for name in ("calibration_runs", "runs")}
    return {
        "suites": suites,
        "checkpoints": compute_checkpoint_losses([_draw_planned(*recipe) for recipe in reported]),
        "setting": setting | {"held_out": sorted(HELD_OUT)},
        "versions": list_versions(),
    }


def find_thresholds(contender: Contender, healthy: Sequence[Records]) -> list[Point]:
    """The contender's own points; if it is calibrated, also those that stop 1 and 5 % of these healthy runs."""
    own_points = [
        (name, alarm, BOUND_ERROR if name in (AS_SHIPPED, STATED) else math.exp(-alarm))
        for name, alarm in contender.points.items()
    ]
    if not contender.calibrated:
        return own_points
    _, levels = calibrate_thresholds(healthy, RATES)
    stricter = ((item.rate, math.inf if item.value is None else item.value) for item in levels)
    return [*((format_percent(rate, 0), alarm, rate) for rate, alarm in stricter), *own_points]


def compute_checkpoint_losses(worlds: Sequence[World]) -> dict[str, dict[str, Any]]:
    """The mean loss of the chosen checkpoint as a share of the gain, by rule and noise, over runs without stops."""
    return {
        name: {
            f"{level:g}": asdict(
                estimate_mean([_compute_loss(choose, world) for world in worlds if world.noise.level == level])
            )
            for level in LEVELS
        }
        for name, choose in CHOOSERS.items()
    }


def _compute_loss(choose: Callable[[Scores], BestCheckpoint | None], world: World) -> float:
    errors = np.full(len(world.steps), np.nan) if world.eval_stderr is None else world.eval_stderr
    scores = [
        Score(step, score, None if math.isnan(error) else error)
        for step, score, error in zip(world.steps.tolist(), world.eval_scores.tolist(), errors.tolist(), strict=True)
    ]
    best = choose(Scores().add_scores(scores).add_checkpoints(dict.fromkeys((score.step for score in scores), "")))
    lost = compute_eval_loss(Outcome(None, best.step if best else None), world.truth)
    assert lost is not None, world.name  # every world has an eval
    return lost


def _draw_planned(family: str, seed: int) -> World:
    return add_planned_steps(draw_world(family, seed))


def _draw_half_planned(family: str, seed: int) -> World:
    return add_planned_steps(draw_world(family, seed), PLANNED_SHARE)


def _record_worlds(
    contenders: Sequence[Contender], recipes: Sequence[tuple[str, int]], draw: Draw, title: str, jobs: int
) -> list[dict[str, Records]]:
    """The records of each contender by name, a row for each run."""
    return sweep(partial(_draw_and_record, list(contenders), draw), recipes, title, jobs) if contenders else []


def _draw_and_record(contenders: Sequence[Contender], draw: Draw, recipe: tuple[str, int]) -> dict[str, Records]:
    return _record_world(contenders, draw(*recipe))


def _record_world(contenders: Sequence[Contender], world: World) -> dict[str, Records]:
    return {item.name: item.run(world) for item in contenders}


def _compute_suite(
    contenders: Sequence[Contender],
    points: dict[str, list[Point]],
    worlds: Sequence[World],
    rows: Sequence[dict[str, Records]],
) -> dict[str, Any]:
    suite = {}
    for item in contenders:
        for name, alarm, error in points[item.name]:
            stops = (row[item.name].first_at(alarm) for row in rows)
            judged = [(keep_highest(world, stop), world) for world, stop in zip(worlds, stops, strict=True)]
            suite[f"{item.name}, {name}"] = compute_figures(judged, error)
    return suite


def _print_noise_tables(console: Console, report: dict[str, Any]) -> None:
    levels = [f"{level:g}" for level in LEVELS]
    table = new_table("recall by noise as a share of the gain", "", *levels)
    for name, figures in report["suites"]["reporting"].items():
        by_noise = figures["by_noise"]
        recalls = (by_noise[level]["recall"]["value"] if level in by_noise else math.nan for level in levels)
        table.add_row(name, *(format_number(recall, 2) for recall in recalls))
    console.print(table)
    table = new_table("loss of the chosen checkpoint, as a share of the gain, by noise", "", *levels)
    for name, losses in report["checkpoints"].items():
        table.add_row(name, *(format_number(losses[level]["value"], 4) for level in levels))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
