"""`python -m evalstop_lab.benchmarks.detection.levelled_off`: what stops because the eval has levelled off would lose.

Each run is stopped when its outlook first reaches the threshold, whether or not it has turned. Lost is what the
noiseless curve still gained, as a share of the run's unit; saved is the share of the evals that were not run.
Calibration seeds are for choosing the threshold, reporting seeds for figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
from evalstop_detectors import MetricRole
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.policy.policy import LEVELLED_OFF_AT

from evalstop_lab.arguments import positive_number
from evalstop_lab.sweep import cores, sweep
from evalstop_lab.worlds import CALIBRATION_SEED, REPORTING, REPORTING_SEED, make, plan, tell_length

NOTABLE = 0.05
"""A loss above this share of a run's unit is counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object a kind of run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("`: ")[-1])
    parser.add_argument("--runs", type=positive_number, default=2000, help="half hacking (default: 2000)")
    parser.add_argument("--at", type=float, default=LEVELLED_OFF_AT, help="the threshold (default: %(default)s)")
    parser.add_argument("--calibration", action="store_true", help="on calibration seeds and families")
    parser.add_argument("--untold", action="store_true", help="runs that do not tell their length")
    parser.add_argument("--jobs", type=positive_number, default=cores(), help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    recipes = (
        plan(options.runs, CALIBRATION_SEED) if options.calibration else plan(options.runs, REPORTING_SEED, REPORTING)
    )
    found = sweep(partial(_stop_run, options.at, not options.untold), recipes, "levelled off", options.jobs)
    for label in sorted({label for label, _, _ in found}):
        of_label = [(lost, saved) for other, lost, saved in found if other == label]
        stopped = [(lost, saved) for lost, saved in of_label if lost is not None]
        losses = [lost for lost, _ in stopped]
        row = {
            "runs": label,
            "n": len(of_label),
            "stopped": len(stopped) / len(of_label),
            "saved_a_run": sum(saved for _, saved in stopped) / len(of_label),
            "lost_a_stop": float(np.mean(losses)) if losses else None,
            "stops_that_lost_more": sum(lost > NOTABLE for lost in losses) / len(losses) if losses else None,
            "worst": max(losses, default=None),
        }
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


def _stop_run(at: float, told: bool, recipe: tuple[str, int]) -> tuple[str, float | None, float]:
    """The kind of the run, what the stop lost (None: there was none), and the share of its evals that it saved."""
    world = tell_length(make(*recipe)) if told else make(*recipe)
    truth, detector = world.truth, Posterior()
    state = detector.start()
    for item in world.observations():
        state, evidence = detector.step(state, item)
        if item.step == truth.steps[-1]:
            break
        if item.role is MetricRole.EVAL and evidence.outlook is not None and evidence.outlook.reaches(at):
            index = int(np.searchsorted(truth.steps, item.step))
            scores = truth.eval_scores
            lost = float((scores.max() - scores[: index + 1].max()) / truth.unit)
            return str(truth.label), lost, 1 - index / (len(scores) - 1)
    return str(truth.label), None, 0.0


if __name__ == "__main__":
    sys.exit(main())
