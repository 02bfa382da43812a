"""What a run's detectors are shown: its metrics by the roles they play, turned so that higher is better. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from evalstop_detectors import Observation, Policy, Score, Signal

from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run

DEFAULT_METRICS: dict[str, dict[str, str]] = {
    "eval": {"signal": "eval", "direction": "maximize"},
    "proxy": {"signal": "proxy", "direction": "maximize"},
    "kl": {"signal": "kl", "direction": "minimize"},
    "loss": {"signal": "loss", "direction": "minimize"},
}


def watched(run: Run, policy: Policy) -> set[str]:
    """The metrics of a run that its policy looks at."""
    return {metric for metric, role in run.metrics.items() if role["signal"] in policy.signals}


def observations(run: Run, policy: Policy, points: Iterable[Point]) -> list[Observation]:
    """The points that the policy's detectors are to see, in the order in which they are to see them."""
    metrics = watched(run, policy)
    seen = (_observation(run, point) for point in points if point.metric in metrics)
    return sorted(seen, key=lambda observation: observation.order)


def eval_metric(run: Run) -> str | None:
    """The metric that is gold for this run."""
    return next((metric for metric, role in run.metrics.items() if role["signal"] == Signal.EVAL), None)


def scores(run: Run, points: Iterable[Point]) -> list[Score]:
    """The finite gold scores among points that are ordered by step."""
    gold = eval_metric(run)
    return [
        Score(point.step, sign(run.metrics, point.metric) * point.value, point.stderr)
        for point in points
        if point.metric == gold and math.isfinite(point.value)
    ]


def sign(metrics: Mapping[str, Mapping[str, str]], metric: str) -> float:
    """What turns a metric so that higher is better. A KL is a distance, not a quality: it stays as it is."""
    role = metrics[metric]
    return -1.0 if role["direction"] == "minimize" and role["signal"] != Signal.KL else 1.0


def _observation(run: Run, point: Point) -> Observation:
    progress = min(1.0, point.step / run.total_steps) if run.total_steps else None
    return Observation(
        signal=Signal(run.metrics[point.metric]["signal"]),
        step=point.step,
        value=sign(run.metrics, point.metric) * point.value,
        stderr=point.stderr,
        progress=progress,
    )
