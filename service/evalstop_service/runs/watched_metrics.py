"""The metrics of a run by role, as its detectors see them: with signs such that higher is better. Pure.

A run with several evals is judged by one score, by default their weighted mean, which ingestion stores as a series
(`COMBINED_METRIC`): all code that reads a run treats it as the eval. See `evalstop_detectors.combined_eval`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from evalstop_detectors import (
    ROLES,
    CombinedState,
    EvalValue,
    MetricRole,
    Observation,
    Policy,
    Score,
    Verdict,
    start_combining,
)
from evalstop_detectors.roles.words import LEARNING_RATES

from evalstop_service.domain.run import COMBINED_METRIC, Call, Evidence, MetricFields, find_version
from evalstop_service.domain.run import Verdict as RecordedVerdict
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

DEFAULT_METRICS: dict[str, MetricFields] = {
    "eval": {"role": "eval", "direction": "maximize"},
    "proxy": {"role": "proxy", "direction": "maximize"},
    "kl": {"role": "kl", "direction": "minimize"},
    "loss": {"role": "loss", "direction": "minimize"},
}

PAIRED_METRIC = "evalstop/paired"
"""The metric of answers to requests to evaluate now: the current score less the best one's."""

OWN_METRICS = frozenset({PAIRED_METRIC, COMBINED_METRIC})
"""Metrics that the service writes and trainers may not."""


class WatchedMetrics:
    """The metrics of a run that the detectors of a policy see, with their roles and directions.

    `policy`: as it judges this run. `eval_metric`: the eval metric of the run, whether or not the policy watches it;
    `eval_sign` turns it so that higher is better. `combined`: if there are several evals, their names and weights.
    """

    def __init__(self, run: Run, policy: Policy) -> None:
        self.policy, self.combined = policy, find_combined_evals(run)
        self._roles = {
            metric: (MetricRole(role["role"]), find_sign(run, metric))
            for metric, role in run.metrics.items()
            if role["role"] in policy.roles and metric not in self.combined
        }
        self._roles |= {
            metric: (MetricRole.LEARNING_RATE, 1.0) for metric in LEARNING_RATES if metric not in run.metrics
        }
        self._critical = {metric: number for number, metric in enumerate(policy.critical, start=1)}
        if self.combined:
            self._roles[COMBINED_METRIC] = (MetricRole.EVAL, 1.0)
            self._roles |= {metric: (MetricRole.EVAL, find_sign(run, metric)) for metric in self._critical}
        self._total_steps = run.total_steps
        self._eval_changes = run.eval_changes
        self.eval_metric = find_eval_metric(run)
        self.eval_sign = find_sign(run, self.eval_metric)
        if self.eval_metric is not None and MetricRole.PAIRED in policy.roles:
            self._roles[PAIRED_METRIC] = (MetricRole.PAIRED, self.eval_sign)

    @property
    def metrics(self) -> list[str]:
        """The metrics that the policy watches."""
        return list(self._roles)

    def observations(self, points: Iterable[PostedObservation]) -> list[Observation]:
        """The observations to show to the policy's detectors, in the order of their steps."""
        observations, total, roles, changes = [], self._total_steps, self._roles, self._eval_changes
        critical = self._critical
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
                number = critical.get(point.metric, 0) if critical else 0
                observations.append(
                    Observation(role, step, sign * point.value, point.stderr, progress, version, number)
                )
        if not in_order:
            observations.sort(key=_ORDER_OF_SEVERAL if critical else _ORDER)
            return _keep_highest_rates(observations)
        return observations


def _keep_highest_rates(observations: list[Observation]) -> list[Observation]:
    """The observations with one learning rate a step: several optimizers log one each."""
    rates = [item for item in observations if item.role is MetricRole.LEARNING_RATE]
    if len({item.step for item in rates}) == len(rates):
        return observations
    highest = {item.step: item for item in sorted(rates, key=lambda item: (math.isfinite(item.value), item.value))}
    others = [item for item in observations if item.role is not MetricRole.LEARNING_RATE]
    return sorted([*others, *highest.values()], key=_ORDER_OF_SEVERAL)


_ORDER = attrgetter("order")
_ORDER_OF_SEVERAL = attrgetter("order", "critical")  # within a step the watched score comes first


def find_guessed_roles(run: Run) -> frozenset[MetricRole]:
    """The guessed roles of metrics: no run is stopped on them."""
    guessed = run.recognition.guessed if run.recognition is not None else []
    return frozenset(MetricRole(run.metrics[metric]["role"]) for metric in guessed)


def restrict_policy(policy: Policy, run: Run) -> Policy:
    """The policy as it judges this run: it never stops on guesses, and requests evaluations only if they are answered.

    Every monitor of a run uses this policy.
    """
    # A paired evaluation measures one eval, in its unit, which differs from that of a mean of several.
    eval_share = None if find_combined_evals(run) else run.eval_share
    critical = [metric for metric in find_combined_evals(run) if run.metrics[metric].get("critical")]
    return policy.with_evaluator(eval_share).with_guessed(find_guessed_roles(run)).with_critical(critical)


def find_eval_metric(run: Run) -> str | None:
    """The eval metric of a run: the one with that role, or the weighted mean of several."""
    evals = list_evals(run.metrics)
    return COMBINED_METRIC if len(evals) > 1 else next(iter(evals), None)


def list_evals(metrics: Mapping[str, MetricFields]) -> list[str]:
    """The metrics with the role `eval`."""
    return [metric for metric, role in metrics.items() if role["role"] == MetricRole.EVAL]


def find_combined_evals(run: Run) -> dict[str, float]:
    """The evals of a run that are judged by their mean, by name, with their weights; empty for a single eval."""
    evals = list_evals(run.metrics)
    return {metric: run.metrics[metric].get("weight", 1.0) for metric in sorted(evals)} if len(evals) > 1 else {}


def start_run_combining(run: Run) -> CombinedState:
    """The state before the first value of the run's evals."""
    evals = find_combined_evals(run)
    required = (place for place, metric in enumerate(evals) if run.metrics[metric].get("required"))
    return start_combining(len(evals), required)


def list_watched(run: Run) -> dict[str, MetricFields]:
    """The metrics with a role, and the mean of several evals, which is then the eval."""
    if not find_combined_evals(run):
        return run.metrics
    return {COMBINED_METRIC: {"role": "eval", "direction": "maximize"}, **run.metrics}


def select_eval_values(run: Run, points: Iterable[PostedObservation]) -> list[EvalValue]:
    """The values of the combined evals among points, by ascending step."""
    positions = {metric: position for position, metric in enumerate(find_combined_evals(run))}
    signs = {metric: find_sign(run, metric) for metric in positions}
    changes = run.eval_changes
    return sorted(
        EvalValue(
            point.step,
            positions[point.metric],
            signs[point.metric] * point.value,
            point.stderr,
            find_version(changes, point.step),
        )
        for point in points
        if point.metric in positions
    )


def select_evals(run: Run, points: Iterable[PostedObservation], metric: str | None = None) -> list[Score]:
    """The eval scores among points ordered by step, finite or not; with `metric`, of that one of several evals."""
    eval_metric = metric or find_eval_metric(run)
    return [
        Score(
            point.step,
            find_sign(run, point.metric) * point.value,
            point.stderr,
            find_version(run.eval_changes, point.step),
        )
        for point in points
        if point.metric == eval_metric
    ]


def select_scores(run: Run, points: Iterable[PostedObservation]) -> list[Score]:
    """The finite eval scores among points ordered by step."""
    return [score for score in select_evals(run, points) if math.isfinite(score.value)]


def find_eval_sign(run: Run) -> float:
    """The factor that makes higher evals better; 1 for a run without an eval."""
    return find_sign(run, find_eval_metric(run))


def find_sign(run: Run, metric: str | None) -> float:
    """The factor that makes higher values of a metric better, 1 without one. A KL is a distance: it stays unchanged."""
    if metric is None or metric == COMBINED_METRIC:
        return 1.0
    role = run.metrics[metric]
    return ROLES[MetricRole(role["role"])].choose_sign(role["direction"] == "minimize")


def record_verdict(verdict: Verdict) -> RecordedVerdict:
    """The verdict as the store holds it; the store does not import detectors."""
    # Field by field: `msgspec.convert` takes ten times as long, for each new evidence.
    evidence = tuple(
        [
            Evidence(of.detector, of.roles, of.kind, of.value, of.suspect_at, of.stop_at, of.turn_step, of.note)
            for of in verdict.evidence
        ]
    )
    call, step, turn_step = Call(verdict.verdict), verdict.step, verdict.turn_step
    return RecordedVerdict(call, step, turn_step, verdict.reason, evidence, verdict.critical)
