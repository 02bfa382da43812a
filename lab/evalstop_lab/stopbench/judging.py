"""The suites of StopBench; applies rules to their runs, and computes figures of the results.

A suite never changes: a suite with other runs gets another number. docs/stopbench.md describes them. Develop a rule on
the seeds `public`; report once on the seeds `held-out`, which the recorded suites don't have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.stopbench.rules import Factory, PolicyRule, load_rule
from evalstop_lab.worlds import third_suite
from evalstop_lab.worlds.answers import Evaluator
from evalstop_lab.worlds.public_outlines import OUTLINES
from evalstop_lab.worlds.recorded import read_runs
from evalstop_lab.worlds.scoring import Outcome, score_outcomes
from evalstop_lab.worlds.world import World, add_planned_steps, draw_world, plan_worlds

_plan_runs, _read_recorded = lru_cache(maxsize=2)(plan_worlds), lru_cache(maxsize=5)(read_runs)

SEEDS = {"public": 40_000_000, "held-out": 60_000_000}
TRAINED, *LANGUAGE = (
    Path(__file__).with_name(f"{name}.jsonl.gz") for name in ("runs-1", "language-1", "language-2", "language-3")
)
DRAWN_RUNS = 2000
PLANNED_SHARE = 0.5


@dataclass(frozen=True)
class Suite:
    """Runs by number: `draw(seeds, number)` gives the same run on every machine with the same version of numpy."""

    runs: int
    draw: Callable[[str, int], World]
    held_out: bool = True


def _draw_first(seeds: str, number: int) -> World:
    return add_planned_steps(draw_world(*_plan_runs(DRAWN_RUNS, SEEDS[seeds])[number]), PLANNED_SHARE)


def _draw_kinds(kinds: Mapping[str, third_suite.Kind], seeds: str, number: int) -> World:
    turns = third_suite.list_turns(kinds)
    return third_suite.draw_world(turns[number % len(turns)], SEEDS[seeds] + number, kinds)


def _draw_recorded(file: Path, small: bool, seeds: str, number: int) -> World:
    return _read_recorded(file, small)[number]


SUITES: Mapping[str, Suite] = {
    "drawn-1": Suite(DRAWN_RUNS, _draw_first),
    "third-1": Suite(860, partial(_draw_kinds, third_suite.THIRD_SUITE)),
    "public-1": Suite(730, partial(_draw_kinds, OUTLINES)),
    "trained-1": Suite(400, partial(_draw_recorded, TRAINED, False), held_out=False),
    "trained-1-small": Suite(400, partial(_draw_recorded, TRAINED, True), held_out=False),
    "language-1": Suite(72, partial(_draw_recorded, LANGUAGE[0], False), held_out=False),
    "language-2": Suite(40, partial(_draw_recorded, LANGUAGE[1], False), held_out=False),
    "language-3": Suite(50, partial(_draw_recorded, LANGUAGE[2], False), held_out=False),
}


Judged = Sequence[tuple[Outcome, World]]


def judge_run(rules: Sequence[str], suite: str, seeds: str, number: int) -> list[Outcome]:
    world = SUITES[suite].draw(seeds, number)
    return [judge_world(rule, load_rule(rule), world) for rule in rules]


def judge_world(name: str, make_rule: Factory, world: World) -> Outcome:
    """Apply the rule of this name to the run; raises UnusableArguments if the rule fails."""
    rows = [
        (step, *(value if math.isfinite(value) else None for value in values))
        for step, *values in zip(
            world.steps.tolist(),
            world.eval_scores.tolist(),
            [math.nan] * len(world.steps) if world.eval_stderr is None else world.eval_stderr.tolist(),
            world.proxy.tolist(),
            world.kl.tolist(),
            strict=True,
        )
    ][:-1]
    stopped, count = None, 0
    try:
        rule = make_rule(world.planned_steps)
        if isinstance(rule, PolicyRule):
            rule.evaluator = Evaluator(world)
        for row in rows:
            count += 1
            if rule.stop(*row):
                stopped = row[0]
                break
        best_step = getattr(rule, "best_step", None)
    except UnusableArguments:
        raise
    except Exception as error:
        raise UnusableArguments(f"{name} failed at eval {count} of the run {world.name}: {error!r}.") from error
    return keep_highest(world, stopped) if best_step is None else Outcome(stopped, best_step)


def keep_highest(world: World, stop: int | None) -> Outcome:
    """The outcome of a stop at this step, with the checkpoint of the highest measured score up to it."""
    count = len(world.steps) if stop is None else int(np.searchsorted(world.steps, stop)) + 1
    scores = world.eval_scores[:count]
    return Outcome(stop, int(world.steps[int(np.nanargmax(scores))]) if np.isfinite(scores).any() else None)


def compute_figures(judged: Judged) -> dict[str, Any]:
    """The figures of a rule over runs as JSON values: overall, by family, and by known or unknown length."""
    return _compute_group(judged) | {
        "by_family": _compute_by(judged, lambda world: world.family),
        "by_length": _compute_by(judged, lambda world: "unknown" if world.planned_steps is None else "known"),
    }


def _compute_by(judged: Judged, group: Callable[[World], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[tuple[Outcome, World]]] = {}
    for outcome, world in judged:
        groups.setdefault(group(world), []).append((outcome, world))
    return {name: _compute_group(groups[name]) for name in sorted(groups)}


def _compute_group(judged: Judged) -> dict[str, Any]:
    return {"runs": len(judged)} | asdict(score_outcomes([(outcome, world.truth) for outcome, world in judged]))
