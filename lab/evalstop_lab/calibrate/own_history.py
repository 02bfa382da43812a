"""`evalstop-lab calibrate SOURCE`: calibrates thresholds on your own past runs, and evaluates them on others.

Runs that are healthy by their later evals are split in two by a hash of their names. The threshold is calibrated on one
part, and false stops are counted on the other. Right stops are counted on the turned runs among the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from evalstop_detectors import Detector, policy_from_document, policy_to_document
from evalstop_service.domain.outcome import judge_decision
from evalstop_service.domain.run import Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome

from evalstop_lab.backtest.cases import assess_outcome
from evalstop_lab.calibrate.evidence import Records, calibrate_thresholds, record_run
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.runs import Run
from evalstop_lab.report import format_figure, format_percent
from evalstop_lab.sweep import sweep
from evalstop_lab.worlds.scoring import CONFIDENCE, clopper_pearson, wilson

LEAST_RUNS = 10
"""Healthy runs in each part; with fewer the threshold is that of one run, and near nothing."""

SUSPECT_TIMES = 5
"""A policy suspects at the threshold that stops this multiple of healthy runs."""


def calibrate_policy(
    runs: Sequence[Run], detector: Detector[Any], rate: float, jobs: int, name: str = "ours"
) -> dict[str, Any]:
    """The policy that stops at most `rate` of the healthy runs of the calibration part; its description has the results
    on the others.

    Raises UnusableArguments if there are too few runs to find a threshold.
    """
    assessments = sweep(assess_outcome, runs, "assessing outcomes")
    healthy = [run for run, item in zip(runs, assessments, strict=True) if item.run_outcome is RunOutcome.HEALTHY]
    turned = [
        (run, item.turn)
        for run, item in zip(runs, assessments, strict=True)
        if item.turn is not None and not is_for_calibration(run.name)
    ]
    calibrating = [run for run in healthy if is_for_calibration(run.name)]
    others = [run for run in healthy if not is_for_calibration(run.name)]
    if min(len(calibrating), len(others)) < LEAST_RUNS:
        raise UnusableArguments(
            f"Only {len(healthy)} of {len(runs)} runs are healthy by later evals: {len(calibrating)} for calibration"
            f" and {len(others)} to evaluate it; it takes {LEAST_RUNS} each. Add more runs, or set the column of the"
            " eval score with --eval."
        )
    observed = [*healthy, *(run for run, _ in turned)]
    recorded = sweep(partial(record_run, detector), observed, f"calibrating {detector.name}", jobs)
    records = {run.name: item for run, item in zip(observed, recorded, strict=True)}
    threshold, to_suspect = calibrate_thresholds(
        [records[run.name] for run in calibrating], (rate, min(SUSPECT_TIMES * rate, 0.5))
    )
    share = format_percent(rate, 2)
    if threshold.value is None:
        raise UnusableArguments(
            f"No threshold of {detector.name} is strict enough for {share}; try another detector or parameters."
        )
    stopped = clopper_pearson(sum(records[run.name].highest >= threshold.value for run in others), len(others))
    caught = wilson(sum(_is_right_stop(records[run.name], threshold.value, turn) for run, turn in turned), len(turned))
    sentences = [
        f"{detector.name} stops at {threshold.value:.6g}, calibrated on {len(calibrating):,} healthy runs to stop at"
        f" most {share} of them.",
        f"Of {stopped.n:,} other healthy runs it stops {stopped.hits:,}: {format_figure(stopped, 2)}.",
    ]
    if turned:
        sentences.append(f"Of {caught.n:,} turned runs it stops {caught.hits:,} rightly: {format_figure(caught)}.")
    if stopped.n < (needed := count_runs_needed(rate)):
        sentences.append(
            f"There are too few runs to show that it stops at most {share} of healthy runs. This takes at least"
            f" {needed:,} other healthy runs, even if it stops none of them."
        )
    member = {
        "detector": detector.name,
        "params": msgspec.to_builtins(detector),
        # Left out it would be the detector's default.
        "suspect_at": None if to_suspect.value == threshold.value else to_suspect.value,
        "stop_at": threshold.value,
    }
    policy = {"name": name, "description": " ".join(sentences), "members": [member]}
    return policy_to_document(policy_from_document(policy))


def is_for_calibration(name: str) -> bool:
    """Whether the run of this name is in the calibration part; the same on every machine."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[0] % 2 == 0


def count_runs_needed(rate: float) -> int:
    """The number of healthy runs, none of them stopped, that are needed to show that at most `rate` are stopped."""
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(1 - rate))


def _is_right_stop(records: Records, alarm: float, turn: Turn) -> bool:
    step = records.first_at(alarm)
    return step is not None and judge_decision(RunOutcome.TURNED, step, turn) is DecisionOutcome.RIGHT
