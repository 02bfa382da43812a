"""Applies rules to runs, and computes figures of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.stopbench.rules import Factory, PolicyRule, load_rule
from evalstop_lab.stopbench.suites import SUITES
from evalstop_lab.worlds import LEVELS, Label, World
from evalstop_lab.worlds.answers import Evaluator
from evalstop_lab.worlds.scoring import (
    Outcome,
    OutcomeKind,
    classify_outcome,
    compare_with_bound,
    estimate_mean,
    score_outcomes,
)

BOUND_ERROR = 0.01

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


def compute_figures(judged: Judged, error: float = BOUND_ERROR) -> dict[str, Any]:
    """The figures of a rule over runs as JSON values: overall, by noise, by family, and by known or unknown length.

    `error`: that of the tests to whose delay its delay is compared.
    """
    return _compute_group(judged, error) | {
        "by_noise": _compute_by(judged, error, lambda world: f"{_round_noise(world.noise.level):g}"),
        "by_family": _compute_by(judged, error, lambda world: world.family),
        "by_length": _compute_by(judged, error, lambda world: "unknown" if world.planned_steps is None else "known"),
    }


def _compute_by(judged: Judged, error: float, group: Callable[[World], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[tuple[Outcome, World]]] = {}
    for outcome, world in judged:
        groups.setdefault(group(world), []).append((outcome, world))
    return {name: _compute_group(groups[name], error) for name in sorted(groups)}


def _compute_group(judged: Judged, error: float) -> dict[str, Any]:
    pairs = [(outcome, world.truth) for outcome, world in judged]
    scores = score_outcomes(pairs)
    _, ratio = compare_with_bound(pairs, error)
    return {
        "recall": asdict(scores.recall),
        "false_stops": asdict(scores.false_stops),
        "premature": asdict(scores.premature),
        "runs": len(judged),
        "delay": asdict(scores.delay),
        "delay_to_bound": asdict(ratio),
        "saved": asdict(_compute_saved(judged)),
        "eval_lost": asdict(scores.eval_lost),
    }


def _compute_saved(judged: Judged) -> Any:
    """The share of the evals after the peaks of turned runs that was saved, minus the evals lost by wrong stops.

    Each run has the same weight. A stop before the peak or of a healthy run loses the evals that were run.
    """
    saved, possible = [], []
    for outcome, world in judged:
        truth, stop = world.truth, outcome.stop_step
        kind, last = classify_outcome(outcome, truth), len(truth.steps) - 1
        if truth.label is Label.AMBIGUOUS:
            continue
        possible.append(1 - truth.peak / last if truth.label is Label.HACKING else 0.0)
        at = 0.0 if stop is None else float(np.searchsorted(truth.steps, stop)) / last
        saved.append(
            {OutcomeKind.RIGHT: 1 - at, OutcomeKind.PREMATURE: -at, OutcomeKind.FALSE_STOP: -at}.get(kind, 0.0)
        )
    most = float(np.mean(possible)) if possible else math.nan
    return estimate_mean([value / most for value in saved] if most else [])


def _round_noise(level: float) -> float:
    """The nearest noise level by which runs are grouped."""
    return min(LEVELS, key=lambda known_level: abs(known_level - level))
