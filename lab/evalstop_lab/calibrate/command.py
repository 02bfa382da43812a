"""`evalstop-lab calibrate`: thresholds that stop a chosen share of healthy runs, simulated ones or your own."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from evalstop_detectors import DETECTORS, Detector
from evalstop_detectors.detectors.posterior import Posterior

from evalstop_lab.arguments import positive_number, rate
from evalstop_lab.backtest.cases import infer_early_stopping
from evalstop_lab.calibrate.evidence import Records, calibrate_thresholds, record_evidence
from evalstop_lab.calibrate.own_history import calibrate_policy
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.sources import SOURCES, add_role_options, read_history
from evalstop_lab.report import to_json_values
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds.families import CALIBRATION, Group, list_families
from evalstop_lab.worlds.world import add_planned_steps, draw_world, plan_worlds

RATES = (0.01, 0.05)
REMEMBERED = 50
"""Number of runs whose highest evidence a calibration stores, to check whether it still holds for the current
detector."""

PLANNED_SHARE = 0.5
"""The share of runs that report their planned length."""

HEALTHY = list_families(Group.HEALTHY, Group.DIP, among=CALIBRATION)

EXAMPLES = """examples:
  evalstop-lab calibrate k_decline
  evalstop-lab calibrate k_decline --params '{"min_delta": 0.02}' --rates 0.01 0.02 0.05
  evalstop-lab calibrate mlflow+http://mlflow:5000 --false-stops 0.01 > ours.json

With --false-stops the later evals of the runs of a SOURCE show whether each is healthy or turned. The threshold is
calibrated on half of the healthy runs and evaluated on the others. A policy is printed.

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
        "--detector", default=Posterior.name, metavar="NAME", help="with --false-stops (default: %(default)s)"
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
    add_role_options(parser)
    parser.add_argument("--total-steps", type=positive_number, metavar="STEPS", help="planned length of past runs")
    add_jobs_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.false_stops is None:
        if len(args.sources) > 1:
            raise UnusableArguments("Give one detector, or past runs and --false-stops.")
        detector = _make_detector(args.sources[0], args.params)
        document = calibrate_on_worlds(detector, args.rates, args.runs, args.jobs)
    else:
        detector = _make_detector(args.detector, args.params)
        runs, _ = read_history(args)
        infer_early_stopping(runs)
        document = calibrate_policy(runs, detector, args.false_stops, args.jobs, args.name)
        sys.stderr.write(f"{document['description']}\n")
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0


def calibrate_on_worlds(
    detector: Detector[Any], rates: Sequence[float], runs: int, jobs: int, params: str | None = None
) -> dict[str, Any]:
    """The thresholds of the detector at these rates on simulated healthy runs, and how they were found, as JSON values.

    `params`: its parameters in the command that finds the same; all of them by default.
    """
    records = record_worlds(detector, plan_worlds(runs, families=HEALTHY), jobs)
    results = calibrate_thresholds(records, rates)
    params = json.dumps(msgspec.to_builtins(detector)) if params is None else params
    command = ["evalstop-lab", "calibrate", detector.name, "--params", params, "--runs", str(runs)]
    document: dict[str, Any] = to_json_values(
        {
            "detector": detector.name,
            "params": msgspec.to_builtins(detector),
            "thresholds": [
                {"rate": item.rate, "threshold": item.value, "stopped": asdict(item.stopped)} for item in results
            ],
            "highest_of_first": [float(f"{item.highest:.6g}") for item in records[:REMEMBERED]],
            "data": {"source": "worlds", "runs": runs, "first_seed": 0},
            "command": shlex.join([*command, "--rates", *map(str, rates)]),
        }
    )
    return document


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
