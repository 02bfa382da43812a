"""What a run's detectors are shown: its metrics by the roles they play, turned so that higher is better. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from evalstop_detectors import MetricRole, Observation, Policy, Score

from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run

DEFAULT_METRICS: dict[str, dict[str, str]] = {
    "eval": {"role": "eval", "direction": "maximize"},
    "proxy": {"role": "proxy", "direction": "maximize"},
    "kl": {"role": "kl", "direction": "minimize"},
    "loss": {"role": "loss", "direction": "minimize"},
}


class WatchedMetrics:
    """The eyes of a policy on a run: which metrics its detectors see, and how. Made once, looked through often.

    `gold`: the metric that is gold for this run, whether or not the policy looks at it.
    """

    __slots__ = ("_seen", "_total_steps", "gold", "gold_sign")

    def __init__(self, run: Run, policy: Policy) -> None:
        self._seen = {
            metric: (MetricRole(role["role"]), metric_sign(run.metrics, metric))
            for metric, role in run.metrics.items()
            if role["role"] in policy.roles
        }
        self._total_steps = run.total_steps
        self.gold = find_eval_metric(run)
        self.gold_sign = metric_sign(run.metrics, self.gold) if self.gold is not None else 1.0

    @property
    def metrics(self) -> list[str]:
        """The metrics that the policy looks at."""
        return list(self._seen)

    def observations(self, points: Iterable[Point]) -> list[Observation]:
        """The points that the policy's detectors are to see, in the order in which they are to see them."""
        found, total, seen = [], self._total_steps, self._seen
        last_step, sorted_already = -1, True
        for point in points:
            found_role = seen.get(point.metric)
            if found_role is not None:
                role, turned = found_role
                at = point.step
                sorted_already &= at > last_step
                last_step = at
                progress = min(1.0, at / total) if total else None
                found.append(Observation(role, at, turned * point.value, point.stderr, progress))
        if not sorted_already:
            found.sort(key=_ORDER)
        return found


_ORDER = attrgetter("order")


def find_eval_metric(run: Run) -> str | None:
    """The metric that is gold for this run."""
    return next((metric for metric, role in run.metrics.items() if role["role"] == MetricRole.EVAL), None)


def select_evals(run: Run, points: Iterable[Point]) -> list[Score]:
    """The gold scores among points that are ordered by step, finite or not."""
    gold = find_eval_metric(run)
    return [
        Score(point.step, metric_sign(run.metrics, point.metric) * point.value, point.stderr)
        for point in points
        if point.metric == gold
    ]


def select_scores(run: Run, points: Iterable[Point]) -> list[Score]:
    """The finite gold scores among points that are ordered by step."""
    return [score for score in select_evals(run, points) if math.isfinite(score.value)]


def metric_sign(metrics: Mapping[str, Mapping[str, str]], metric: str) -> float:
    """What turns a metric so that higher is better. A KL is a distance, not a quality: it stays as it is."""
    role = metrics[metric]
    return -1.0 if role["direction"] == "minimize" and role["role"] != MetricRole.KL else 1.0
