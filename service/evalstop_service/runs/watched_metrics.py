"""The metrics of a run by role, as its detectors are shown them: turned so that higher is better. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from evalstop_detectors import MetricRole, Observation, Policy, Score

from evalstop_service.rules.eval_changes import find_version
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

DEFAULT_METRICS: dict[str, dict[str, str]] = {
    "eval": {"role": "eval", "direction": "maximize"},
    "proxy": {"role": "proxy", "direction": "maximize"},
    "kl": {"role": "kl", "direction": "minimize"},
    "loss": {"role": "loss", "direction": "minimize"},
}


PAIRED_METRIC = "evalstop/paired"
"""The observations that answers to requests to evaluate now become: the current score less the best one's."""


class WatchedMetrics:
    """The metrics of a run that the detectors of a policy are shown, with their roles and directions.

    `eval_metric`: the eval metric of the run, whether or not the policy watches it; `eval_sign` turns it so that
    higher is better.
    """

    __slots__ = ("_eval_changes", "_roles", "_total_steps", "eval_metric", "eval_sign")

    def __init__(self, run: Run, policy: Policy) -> None:
        self._roles = {
            metric: (MetricRole(role["role"]), metric_sign(run.metrics, metric))
            for metric, role in run.metrics.items()
            if role["role"] in policy.roles
        }
        self._total_steps = run.total_steps
        self._eval_changes = run.eval_changes
        self.eval_metric = find_eval_metric(run)
        self.eval_sign = metric_sign(run.metrics, self.eval_metric) if self.eval_metric is not None else 1.0
        if self.eval_metric is not None and MetricRole.PAIRED in policy.roles:
            self._roles[PAIRED_METRIC] = (MetricRole.PAIRED, self.eval_sign)

    @property
    def metrics(self) -> list[str]:
        """The metrics that the policy watches."""
        return list(self._roles)

    def observations(self, points: Iterable[PostedObservation]) -> list[Observation]:
        """The observations to show to the policy's detectors, in the order of their steps."""
        observations, total, roles, changes = [], self._total_steps, self._roles, self._eval_changes
        last_step, in_order = -1, True
        for point in points:
            watched = roles.get(point.metric)
            if watched is not None:
                role, sign = watched
                step = point.step
                in_order &= step > last_step
                last_step = step
                progress = min(1.0, step / total) if total else None
                version = find_version(changes, step) if changes else 0
                observations.append(Observation(role, step, sign * point.value, point.stderr, progress, version))
        if not in_order:
            observations.sort(key=_ORDER)
        return observations


_ORDER = attrgetter("order")


def find_guessed_roles(run: Run) -> frozenset[MetricRole]:
    """The roles that were given to metrics on a guess: on them no run is stopped."""
    guessed = run.recognition.guessed if run.recognition is not None else []
    return frozenset(MetricRole(run.metrics[metric]["role"]) for metric in guessed)


def restrict_policy(policy: Policy, run: Run) -> Policy:
    """The policy as it judges this run: it stops nothing on guesses, and asks for evaluations where somebody answers.

    Every monitor of a run is stepped with this.
    """
    return policy.with_evaluator(run.eval_share).with_guessed(find_guessed_roles(run))


def find_eval_metric(run: Run) -> str | None:
    """The metric with the role `eval` of a run."""
    return next((metric for metric, role in run.metrics.items() if role["role"] == MetricRole.EVAL), None)


def select_evals(run: Run, points: Iterable[PostedObservation]) -> list[Score]:
    """The eval scores among points that are ordered by step, finite or not."""
    eval_metric = find_eval_metric(run)
    return [
        Score(
            point.step,
            metric_sign(run.metrics, point.metric) * point.value,
            point.stderr,
            find_version(run.eval_changes, point.step),
        )
        for point in points
        if point.metric == eval_metric
    ]


def select_scores(run: Run, points: Iterable[PostedObservation]) -> list[Score]:
    """The finite eval scores among points that are ordered by step."""
    return [score for score in select_evals(run, points) if math.isfinite(score.value)]


def metric_sign(metrics: Mapping[str, Mapping[str, str]], metric: str) -> float:
    """The factor that turns a metric so that higher is better. A KL is a distance, not a quality: it is not turned."""
    role = metrics[metric]
    return -1.0 if role["direction"] == "minimize" and role["role"] != MetricRole.KL else 1.0
