"""`python -m evalstop_lab.benchmarks.detection.studies`: two studies of policies on drawn runs, as lines of JSON.

`levelled_off`: each run is stopped when its outlook first reaches the threshold, whether or not it has turned. The loss
is the gain of the noiseless curve after the stop, as a share of the run's unit; saved is the share of evals not run.
Choose the threshold on calibration seeds, and report figures on reporting seeds.

`several_evals`: how well `default` works on the mean of three evals, which have different units and independent noise,
each at the level of the run's single eval. Either all follow the run's curve, or one does and the others are those of
healthy runs; that one may be declared critical. The seeds are reporting seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from evalstop_detectors import (
    POLICIES,
    EvalValue,
    MetricRole,
    Observation,
    advance,
    combine_values,
    start,
    start_combining,
)
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.policy.policy import LEVELLED_OFF_AT
from msgspec.structs import replace

from evalstop_lab.arguments import positive_number
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds import (
    CALIBRATION_SEED,
    REPORTING_SEED,
    Group,
    Label,
    World,
    add_planned_steps,
    draw_world,
    list_families,
    plan_worlds,
)

SEVERAL_SEED = REPORTING_SEED + 4_000_000
UNITS = (1.0, 30.0, 0.02)
NOTABLE = 0.05
"""Losses above this share of a run's unit are counted."""


class Setting(NamedTuple):
    """The number of evals, how many of them follow the run's curve, and whether the first is critical."""

    evals: int
    following: int
    critical: bool = False


SETTINGS = {
    "one eval": Setting(1, 1),
    "three, all follow": Setting(3, 3),
    "three, one follows": Setting(3, 1),
    "three, one follows and is critical": Setting(3, 1, critical=True),
    "three, all follow, one critical": Setting(3, 3, critical=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object per label of runs, or per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("levelled_off", "several_evals"))
    parser.add_argument("--runs", type=positive_number, default=2000, help="number of runs, half hacking (%(default)s)")
    parser.add_argument("--at", type=float, default=LEVELLED_OFF_AT, help="threshold of levelled_off (%(default)s)")
    parser.add_argument("--calibration", action="store_true", help="levelled_off on calibration seeds and families")
    parser.add_argument("--unplanned", action="store_true", help="levelled_off where no planned length is reported")
    add_jobs_option(parser)
    options = parser.parse_args(arguments)
    for row in _measure_plateaus(options) if options.study == "levelled_off" else _measure_several(options):
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


def _measure_plateaus(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    recipes = plan_worlds(options.runs, CALIBRATION_SEED if options.calibration else REPORTING_SEED)
    results = sweep(partial(_stop_run, options.at, not options.unplanned), recipes, "stopping runs", options.jobs)
    for label in sorted({label for label, _, _ in results}):
        of_label = [(lost, saved) for other, lost, saved in results if other == label]
        losses = [lost for lost, _ in of_label if lost is not None]
        yield {
            "runs": label,
            "n": len(of_label),
            "stopped": len(losses) / len(of_label),
            "saved_a_run": sum(saved for _, saved in of_label) / len(of_label),
            "lost_a_stop": float(np.mean(losses)) if losses else None,
            "stops_that_lost_more": sum(lost > NOTABLE for lost in losses) / len(losses) if losses else None,
            "worst": max(losses, default=None),
        }


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
            index, scores = int(np.searchsorted(truth.steps, item.step)), truth.eval_scores
            lost = float((scores.max() - scores[: index + 1].max()) / truth.unit)
            return str(truth.label), lost, 1 - index / (len(scores) - 1)
    return str(truth.label), None, 0.0


def _measure_several(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    results = sweep(_judge_settings, plan_worlds(options.runs, SEVERAL_SEED), "several evals", options.jobs)
    for name in SETTINGS:
        turning = [stops[name] for label, stops in results if label is Label.HACKING]
        healthy = [stops[name] for label, stops in results if label is Label.HEALTHY]
        delays = [delay for delay in turning if delay is not None and delay >= 0]
        yield {
            "setting": name,
            "recall": len(delays) / len(turning),
            "premature": sum(delay is not None and delay < 0 for delay in turning) / len(turning),
            "false_stops": sum(delay is not None for delay in healthy) / len(healthy),
            "median_delay": float(np.median(delays)) if delays else None,
            "turning": len(turning),
            "healthy": len(healthy),
        }


def _judge_settings(recipe: tuple[str, int]) -> tuple[Label, dict[str, int | None]]:
    """The label of the run, and by setting the evals from its peak to its stop; None: not stopped before its end."""
    world = add_planned_steps(draw_world(*recipe))
    stops: dict[str, int | None] = {}
    for name, setting in SETTINGS.items():
        guarded = POLICIES["default"].with_critical(["first"] if setting.critical else [])
        state, _ = advance(guarded, start(guarded), _build_observations(world, setting))
        step = state.verdict.step if state.verdict.stops else None
        index = None if step is None else int(np.searchsorted(world.steps, step))
        stops[name] = None if index in (None, len(world.steps) - 1) else index - world.truth.peak
    return world.truth.label, stops


def _build_observations(world: World, setting: Setting) -> list[Observation]:
    """The run's observations, with the evals of the setting instead of its own."""
    rng = np.random.default_rng([world.seed, setting.evals])
    length, level, families = len(world.steps), world.noise.level, list_families(Group.HEALTHY)
    columns = []
    for place in range(setting.evals):
        truth = world.truth
        if place >= setting.following:
            truth = draw_world(families[(world.seed + place) % len(families)], world.seed + place, length=length).truth
        noise = rng.normal(0.0, level * truth.unit, length)
        columns.append((UNITS[place] * (truth.eval_scores + noise), UNITS[place] * level * truth.unit))
    values = [
        EvalValue(step, place, float(scores[index]), sd if world.eval_stderr is not None else None)
        for index, step in enumerate(world.steps.tolist())
        for place, (scores, sd) in enumerate(columns)
    ]
    combined: Sequence[Any] = values
    if setting.evals > 1:
        _, combined = combine_values((1.0,) * setting.evals, start_combining(setting.evals), values)
    evals = [Observation(MetricRole.EVAL, item.step, item.value, item.stderr) for item in combined]
    if setting.critical:
        first = [item for item in values if item.place == 0]
        evals += [Observation(MetricRole.EVAL, item.step, item.value, item.stderr, critical=1) for item in first]
    if world.planned_steps is not None:
        evals = [replace(item, progress=min(1.0, item.step / world.planned_steps)) for item in evals]
    other_roles = [item for item in world.observations() if item.role is not MetricRole.EVAL]
    return sorted([*other_roles, *evals], key=lambda item: (item.order, item.critical))


if __name__ == "__main__":
    sys.exit(main())
