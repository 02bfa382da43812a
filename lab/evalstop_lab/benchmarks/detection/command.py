"""`make bench-detection`: how well detectors and policies find the turn, compared with published rules and an oracle.

Thresholds are calibrated on calibration seeds and families, where half of the runs report their planned length. Figures
are measured on reporting seeds, which include held-out families. There all runs report their planned length, and 15 %
of the plans are wrong. Policies and the detectors that use the planned length are also evaluated without it, and on the
second suite, whose author knew neither detectors nor families. Recall is a share of hacking runs, false stops are a
share of healthy runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.detection.contenders import Contender, list_contenders
from evalstop_lab.benchmarks.detection.report import draw_roc, print_tables
from evalstop_lab.benchmarks.detection.scoring import (
    JudgedWorld,
    compute_checkpoint_losses,
    compute_figures,
    compute_roc,
    find_operating_points,
    score_runs,
)
from evalstop_lab.calibrate.command import HEALTHY, PLANNED_SHARE
from evalstop_lab.calibrate.evidence import Records
from evalstop_lab.report import list_versions, to_json_values
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

QUICK_RUNS = 60
SECOND_SUITE_SEED = REPORTING_SEED + 2_000_000
RECORDED = Path("tests/data/rlhf_runs_public.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its tables, and write a plot and the report to a folder."""
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
    parser.add_argument("--folder", type=Path, default=Path("bench-detection"), help="for the plot (%(default)s)")
    add_jobs_option(parser)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_RUNS} runs of each kind; the figures are not representative"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if options.quick:
        options.calibration_runs = options.runs = QUICK_RUNS
    report, curves = measure_contenders(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps(to_json_values(report))
    (options.folder / "report.json").write_text(document + "\n", encoding="utf-8")
    draw_roc(options.folder / "roc.png", curves)
    if options.json:
        sys.stdout.write(document + "\n")
    else:
        console = Console() if sys.stdout.isatty() else Console(width=220)
        print_tables(console, report)
        console.print(f"Wrote roc.png and report.json to {options.folder}/")
    return 0


def measure_contenders(
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, dict[str, list[tuple[float, float]]]]]:
    """The report as JSON values, and the ROC of each contender by noise."""
    contenders = [
        item for item in list_contenders() if options.only is None or any(item.name.startswith(n) for n in options.only)
    ]
    calibration = plan_worlds(options.calibration_runs, families=HEALTHY)
    calibrating = _judge_worlds(contenders, calibration, _make_half_planned, "calibrating", options.jobs)
    reported = plan_worlds(options.runs, REPORTING_SEED)
    reporting = _judge_worlds(contenders, reported, _make_planned, "reporting", options.jobs)
    compared = [item for item in contenders if item.compared]
    unplanned = _judge_worlds(compared, reported, draw_world, "unknown length", options.jobs)
    kinds = list(second_suite.SECOND_SUITE)
    drawn = [(kinds[index % len(kinds)], SECOND_SUITE_SEED + index) for index in range(options.runs)]
    second = _judge_worlds(compared, drawn, second_suite.draw_world, "second suite", options.jobs)
    recorded = (
        [replace(run, planned_steps=float(run.steps[-1])) for run in load_recorded_runs(options.recorded)]
        if (options.recorded.exists())
        else []
    )
    rows: list[dict[str, Any]] = []
    curves = {}
    for item in contenders:
        judged = {
            "calibration": calibrating[item.name],
            "reporting": reporting[item.name],
            "recorded": [JudgedWorld(world, item.run(world)) for world in recorded],
            "unplanned": unplanned.get(item.name, ()),
            "second_suite": second.get(item.name, ()),
        }
        rows += _build_rows(item, judged)
        operating_points = [] if item.calibrated else find_operating_points(item, judged["calibration"])
        curves[item.name] = {
            f"{level:g}": compute_roc(
                [run for run in reporting[item.name] if run.world.noise.level == level], operating_points
            )
            for level in LEVELS
        }
    setting = {name: getattr(options, name) for name in ("calibration_runs", "runs")}
    worlds = [judged.world for judged in next(iter(reporting.values()))]
    report = {
        "rows": rows,
        "checkpoints": compute_checkpoint_losses(worlds),
        "setting": setting | {"held_out": sorted(HELD_OUT), "recorded_runs": len(recorded)},
        "versions": list_versions(),
    }
    return report, curves


def _build_rows(item: Contender, judged: Mapping[str, Sequence[JudgedWorld]]) -> Iterator[dict[str, Any]]:
    """A row for each operating point of a contender; `judged` are its records by the purpose of the runs."""
    for point in find_operating_points(item, judged["calibration"]):
        others = {
            part: score_runs(judged[part], point) if judged[part] else {}
            for part in ("recorded", "unplanned", "second_suite")
        }
        key = {"contender": item.name, "group": item.group, "at": point.name}
        yield key | compute_figures(judged["reporting"], point) | others


Draw = Callable[[str, int], World]


def _make_planned(family: str, seed: int) -> World:
    return add_planned_steps(draw_world(family, seed))


def _make_half_planned(family: str, seed: int) -> World:
    return add_planned_steps(draw_world(family, seed), PLANNED_SHARE)


def _judge_worlds(
    contenders: Sequence[Contender], recipes: Sequence[tuple[str, int]], draw: Draw, title: str, jobs: int
) -> dict[str, list[JudgedWorld]]:
    if not contenders:
        return {}
    rows = sweep(partial(_judge_world, list(contenders), draw), recipes, title, jobs)
    worlds = [draw(family, seed) for family, seed in recipes]
    return {
        item.name: [JudgedWorld(world, row[index]) for world, row in zip(worlds, rows, strict=True)]
        for index, item in enumerate(contenders)
    }


def _judge_world(contenders: Sequence[Contender], draw: Draw, recipe: tuple[str, int]) -> list[Records]:
    world = draw(*recipe)
    return [item.run(world) for item in contenders]


if __name__ == "__main__":
    sys.exit(main())
