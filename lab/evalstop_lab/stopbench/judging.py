"""Applies rules to runs, and computes figures of the results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.stopbench.rules import PolicyRule, load_rule
from evalstop_lab.stopbench.suites import SUITES
from evalstop_lab.worlds import Label, World
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


@dataclass(frozen=True)
class Judgement:
    """The outcome of a rule on a run, the time that it took, and the number of evals that it saw."""

    outcome: Outcome
    seconds: float
    evals: int


def judge_run(rules: Sequence[str], suite: str, seeds: str, number: int) -> list[Judgement]:
    world = SUITES[suite].draw(seeds, number)
    return [_judge_world(rule, world) for rule in rules]


def _judge_world(name: str, world: World) -> Judgement:
    """Apply the rule to the run; raises UnusableArguments if the rule fails."""
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
        rule = load_rule(name)(world.planned_steps)
        if isinstance(rule, PolicyRule):
            rule.evaluator = Evaluator(world)
        started = time.perf_counter()
        for row in rows:
            count += 1
            if rule.stop(*row):
                stopped = row[0]
                break
        seconds = time.perf_counter() - started
        best_step = getattr(rule, "best_step", None)
    except UnusableArguments:
        raise
    except Exception as error:
        raise UnusableArguments(f"{name} failed at eval {count} of the run {world.name}: {error!r}.") from error
    if best_step is None:
        eval_scores = world.eval_scores[: count if stopped is not None else len(world.steps)]
        best_step = int(world.steps[int(np.nanargmax(eval_scores))]) if np.isfinite(eval_scores).any() else None
    return Judgement(Outcome(stopped, best_step), seconds, count)


Judged = Sequence[tuple[Judgement, World]]


def compute_figures(judged: Judged) -> dict[str, Any]:
    """The figures of a rule over runs as JSON values: overall, by noise, by family, and by known or unknown length."""
    return _compute_group(judged) | {
        "microseconds": 1e6 * sum(item.seconds for item, _ in judged) / max(1, sum(item.evals for item, _ in judged)),
        "by_noise": _compute_by(judged, lambda world: f"{_round_noise(world.noise.level):g}"),
        "by_family": _compute_by(judged, lambda world: world.family),
        "by_length": _compute_by(judged, lambda world: "unknown" if world.planned_steps is None else "known"),
    }


def _compute_by(judged: Judged, group: Callable[[World], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[tuple[Judgement, World]]] = {}
    for item, world in judged:
        groups.setdefault(group(world), []).append((item, world))
    return {name: _compute_group(groups[name]) for name in sorted(groups)}


def _compute_group(judged: Judged) -> dict[str, Any]:
    pairs = [(item.outcome, world.truth) for item, world in judged]
    scores = score_outcomes(pairs)
    _, ratio = compare_with_bound(pairs, BOUND_ERROR)
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
    for item, world in judged:
        truth, stop = world.truth, item.outcome.stop_step
        kind, last = classify_outcome(item.outcome, truth), len(truth.steps) - 1
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
    return min((0.0, 0.01, 0.02, 0.05, 0.1, 0.2), key=lambda known_level: abs(known_level - level))
