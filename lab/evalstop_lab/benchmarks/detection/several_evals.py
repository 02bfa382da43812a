"""`python -m evalstop_lab.benchmarks.detection.several_evals`: how well `default` works on the mean of three evals.

The evals of a run have different units and independent noise, each at the level of the run's single eval. Either all
follow its curve, or one does and the others are those of healthy runs; that one may be declared critical. The seeds are
reporting seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

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
from msgspec.structs import replace

from evalstop_lab.arguments import positive_number
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds import (
    REPORTING_SEED,
    Group,
    Label,
    World,
    add_planned_steps,
    draw_world,
    list_families,
    plan_worlds,
)

SEED = REPORTING_SEED + 4_000_000
UNITS = (1.0, 30.0, 0.02)


@dataclass(frozen=True)
class Setting:
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
    """Print one JSON object per setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("`: ")[-1])
    parser.add_argument(
        "--runs", type=positive_number, default=1000, help="number of runs, half hacking (default: 1000)"
    )
    add_jobs_option(parser)
    options = parser.parse_args(arguments)
    recipes = plan_worlds(options.runs, SEED)
    results = sweep(_judge_run, recipes, "several evals", options.jobs)
    for name in SETTINGS:
        turning = [stops[name] for label, stops in results if label is Label.HACKING]
        healthy = [stops[name] for label, stops in results if label is Label.HEALTHY]
        delays = [delay for delay in turning if delay is not None and delay >= 0]
        row = {
            "setting": name,
            "recall": len(delays) / len(turning),
            "premature": sum(delay is not None and delay < 0 for delay in turning) / len(turning),
            "false_stops": sum(delay is not None for delay in healthy) / len(healthy),
            "median_delay": float(np.median(delays)) if delays else None,
            "turning": len(turning),
            "healthy": len(healthy),
        }
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


def _judge_run(recipe: tuple[str, int]) -> tuple[Label, dict[str, int | None]]:
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
    length, level = len(world.steps), world.noise.level
    families = list_families(Group.HEALTHY)
    columns = []
    for place in range(setting.evals):
        truth = world.truth
        if place >= setting.following:
            truth = draw_world(families[(world.seed + place) % len(families)], world.seed + place, length=length).truth
        noise = rng.normal(0.0, level * truth.unit, length)
        columns.append((UNITS[place] * (truth.eval_scores + noise), UNITS[place] * level * truth.unit))
    stderr = [sd if world.eval_stderr is not None else None for _, sd in columns]
    values = [
        EvalValue(step, place, float(columns[place][0][index]), stderr[place])
        for index, step in enumerate(world.steps.tolist())
        for place in range(setting.evals)
    ]
    if setting.evals == 1:
        evals = [Observation(MetricRole.EVAL, item.step, item.value, item.stderr) for item in values]
    else:
        _, scores = combine_values((1.0,) * setting.evals, start_combining(setting.evals), values)
        evals = [Observation(MetricRole.EVAL, item.step, item.value, item.stderr) for item in scores]
    if setting.critical:
        first = [item for item in values if item.place == 0]
        evals += [Observation(MetricRole.EVAL, item.step, item.value, item.stderr, critical=1) for item in first]
    other_roles = [item for item in world.observations() if item.role is not MetricRole.EVAL]
    planned = world.planned_steps
    if planned is not None:
        evals = [replace(item, progress=min(1.0, item.step / planned)) for item in evals]
    return sorted([*other_roles, *evals], key=lambda item: (item.order, item.critical))


if __name__ == "__main__":
    sys.exit(main())
