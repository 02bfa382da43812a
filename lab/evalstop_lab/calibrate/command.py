"""`evalstop-lab calibrate`: thresholds that stop a chosen share of healthy runs, simulated ones or your own."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from evalstop_detectors import DETECTORS, Detector
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number, rate, whole_number
from evalstop_lab.calibrate import own_history
from evalstop_lab.calibrate.evidence import (
    Records,
    Threshold,
    calibrate_thresholds,
    read_healthy_runs,
    record_evidence,
    record_run,
)
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.sources import SOURCES, add_role_options
from evalstop_lab.report import format_interval, format_percent, list_versions, new_table, to_json_values
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds.families import CALIBRATION, HELD_OUT, Group, list_families
from evalstop_lab.worlds.world import REPORTING_SEED, add_planned_steps, draw_world, plan_worlds

RATES = (0.01, 0.05)
REMEMBERED = 50
"""Number of runs whose highest evidence a calibration stores, to check whether it still holds for the current
detector."""

PLANNED_SHARE = 0.5
"""The share of runs that report their planned length."""

HEALTHY = list_families(Group.HEALTHY, Group.DIP, among=CALIBRATION)

EXAMPLES = """examples:
  evalstop-lab calibrate k_decline
  evalstop-lab calibrate k_decline --params '{"min_delta": 0.02}' --rates 0.01 0.02 0.05 --output thresholds.json
  evalstop-lab calibrate k_decline --history our-healthy-runs.jsonl
  evalstop-lab calibrate mlflow+http://mlflow:5000 --false-stops 0.01 --output ours.json

With --false-stops the later evals of the runs of a SOURCE show whether each is healthy or turned. The threshold is
calibrated on half of the healthy runs and evaluated on the others. --output writes a policy.

A history has healthy runs in any format that `evalstop-lab replay` reads, such as JSON lines:
  {"run": "a", "step": 10, "eval": 0.61, "proxy": 1.2, "kl": 3.4}
Runs that ended early are left out.

"""


def record_worlds(detector: Detector[Any], recipes: Sequence[tuple[str, int]], jobs: int = 1) -> list[Records]:
    """The records of the detector over worlds of these families and seeds, in order."""
    return sweep(partial(_record_world, detector), recipes, f"calibrating {detector.name}", jobs)


def _record_world(detector: Detector[Any], recipe: tuple[str, int]) -> Records:
    world = add_planned_steps(draw_world(*recipe), PLANNED_SHARE)
    return record_evidence(detector, world.observations(), world.last_step)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES + SOURCES
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="DETECTOR|SOURCE",
        help=f"one of {', '.join(sorted(DETECTORS))}; with --false-stops past runs, see below",
    )
    parser.add_argument(
        "--false-stops", type=rate, metavar="SHARE", help="find a policy that stops this share of your healthy runs"
    )
    parser.add_argument(
        "--detector", default="posterior", metavar="NAME", help="with --false-stops (default: posterior)"
    )
    parser.add_argument("--name", default="ours", help="name of the policy, with --false-stops (default: ours)")
    parser.add_argument("--params", default="{}", metavar="JSON", help="parameters of the detector (default: its own)")
    parser.add_argument(
        "--rates",
        type=rate,
        nargs="+",
        default=list(RATES),
        metavar="SHARE",
        help="shares of healthy runs to stop (default: 0.01 0.05)",
    )
    parser.add_argument("--runs", type=positive_number, default=2000, help="number of runs to simulate (default: 2000)")
    parser.add_argument(
        "--first-seed", type=whole_number, default=0, help="first seed of the simulated runs (default: 0)"
    )
    parser.add_argument(
        "--history", type=Path, nargs="+", metavar="FILE", help="healthy runs, instead of simulated ones"
    )
    add_role_options(parser)
    parser.add_argument("--total-steps", type=positive_number, metavar="STEPS", help="planned length of past runs")
    add_jobs_option(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the JSON object, or with --false-stops the policy, to this file",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.false_stops is not None:
        return own_history.run(args, _make_detector(args.detector, args.params))
    if len(args.sources) > 1:
        raise UnusableArguments("Give one detector, or past runs and --false-stops.")
    detector = _make_detector(args.sources[0], args.params)
    if args.history is not None:
        runs = read_healthy_runs(args)
        records = sweep(partial(record_run, detector), runs, f"calibrating {detector.name}", args.jobs)
        data: dict[str, Any] = {"source": [str(path) for path in args.history], "runs": len(runs)}
    else:
        if args.first_seed + args.runs > REPORTING_SEED:
            raise UnusableArguments(f"Seeds from {REPORTING_SEED} on are for reports; calibrate with lower ones.")
        recipes = plan_worlds(args.runs, args.first_seed, HEALTHY)
        records = record_worlds(detector, recipes, args.jobs)
        data = {
            "source": "worlds",
            "runs": args.runs,
            "first_seed": args.first_seed,
            "families": list(HEALTHY),
            "held_out": sorted(HELD_OUT),
        }
    kind, results = calibrate_thresholds(records, args.rates)
    document = {
        "detector": detector.name,
        "params": msgspec.to_builtins(detector),
        "kind": kind,
        "thresholds": [_encode_threshold(item) for item in results],
        "highest_of_first": [float(f"{item.highest:.6g}") for item in records[:REMEMBERED]],
        "data": data,
        "command": "evalstop-lab " + shlex.join(sys.argv[1:]),
        "versions": list_versions(),
    }
    encoded = to_json_values(document)
    if args.output is not None:
        args.output.write_text(json.dumps(encoded, indent=2) + "\n", encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(encoded) + "\n")
    else:
        Console().print(_build_table(document))
    return 0


def _make_detector(name: str, params: str) -> Detector[Any]:
    if name not in DETECTORS:
        raise UnusableArguments(
            f"There is no detector {name!r}; choose from {', '.join(sorted(DETECTORS))}."
            " With past runs give --false-stops."
        )
    try:
        detector: Detector[Any] = msgspec.convert(json.loads(params), DETECTORS[name])
    except (ValueError, msgspec.ValidationError) as error:
        raise UnusableArguments(f"--params: {error}; give a JSON object of parameters of {name}.") from error
    return detector


def _encode_threshold(item: Threshold) -> dict[str, Any]:
    return {
        "rate": item.rate,
        "threshold": item.value,
        "interval": [item.low, item.high],
        "stopped": asdict(item.stopped),
    }


def _build_table(document: dict[str, Any]) -> Table:
    caption = f"{document['data']['runs']} healthy runs; evidence: {document['kind']}"
    table = new_table(
        f"thresholds of {document['detector']}",
        "healthy runs stopped, at most",
        "threshold",
        "interval of the threshold",
        "stopped in calibration",
        "its interval, in %",
        left=0,
        caption=caption,
    )
    for row in document["thresholds"]:
        stopped = row["stopped"]
        table.add_row(
            format_percent(row["rate"]),
            "none strict enough" if row["threshold"] is None else f"{row['threshold']:.6g}",
            f"{row['interval'][0]:.4g} to {row['interval'][1]:.4g}",
            f"{stopped['hits']} of {stopped['n']}",
            format_interval(stopped["low"], stopped["high"], 2),
        )
    return table
