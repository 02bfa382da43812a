"""`python -m evalstop_lab.benchmarks.detection.levelled_off`: the loss of stops on plateaus of the eval score.

Each run is stopped when its outlook first reaches the threshold, whether or not it has turned. The loss is the gain of
the noiseless curve after the stop, as a share of the run's unit; saved is the share of evals that were not run. Choose
the threshold on calibration seeds, and report figures on reporting seeds.
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
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds import CALIBRATION_SEED, REPORTING_SEED, add_planned_steps, draw_world, plan_worlds

NOTABLE = 0.05
"""Losses above this share of a run's unit are counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object per label of runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("`: ")[-1])
    parser.add_argument(
        "--runs", type=positive_number, default=2000, help="number of runs, half hacking (default: 2000)"
    )
    parser.add_argument("--at", type=float, default=LEVELLED_OFF_AT, help="threshold (default: %(default)s)")
    parser.add_argument("--calibration", action="store_true", help="use calibration seeds and families")
    parser.add_argument("--unplanned", action="store_true", help="use runs that do not report their planned length")
    add_jobs_option(parser)
    options = parser.parse_args(arguments)
    recipes = plan_worlds(options.runs, CALIBRATION_SEED if options.calibration else REPORTING_SEED)
    results = sweep(partial(_stop_run, options.at, not options.unplanned), recipes, "stopping runs", options.jobs)
    for label in sorted({label for label, _, _ in results}):
        of_label = [(lost, saved) for other, lost, saved in results if other == label]
        losses = [lost for lost, _ in of_label if lost is not None]
        row = {
            "runs": label,
            "n": len(of_label),
            "stopped": len(losses) / len(of_label),
            "saved_a_run": sum(saved for _, saved in of_label) / len(of_label),
            "lost_a_stop": float(np.mean(losses)) if losses else None,
            "stops_that_lost_more": sum(lost > NOTABLE for lost in losses) / len(losses) if losses else None,
            "worst": max(losses, default=None),
        }
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


def _stop_run(threshold: float, is_planned: bool, recipe: tuple[str, int]) -> tuple[str, float | None, float]:
    """The label of the run, the loss of its stop (None: not stopped), and the share of its evals that was saved."""
    world = add_planned_steps(draw_world(*recipe)) if is_planned else draw_world(*recipe)
    truth, detector = world.truth, Posterior()
    state = detector.start()
    for item in world.observations():
        state, evidence = detector.step(state, item)
        if item.step == truth.steps[-1]:
            break
        if item.role is MetricRole.EVAL and evidence.outlook is not None and evidence.outlook.reaches(threshold):
            index = int(np.searchsorted(truth.steps, item.step))
            scores = truth.eval_scores
            lost = float((scores.max() - scores[: index + 1].max()) / truth.unit)
            return str(truth.label), lost, 1 - index / (len(scores) - 1)
    return str(truth.label), None, 0.0


if __name__ == "__main__":
    sys.exit(main())
