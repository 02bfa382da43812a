"""The rules that StopBench evaluates: yours, EvalStop's policies, and unmodified early stopping of other libraries.

A rule is a class, with one object per run; docs/stopbench.md shows one. `stop` is called after each eval except the
last. The optional property `best_step` is the step of the checkpoint that the rule keeps; the default is the one with
the highest score so far.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import evalstop_detectors
from evalstop_detectors import (
    DETECTORS,
    POLICIES,
    Detector,
    MetricRole,
    Observation,
    Policy,
    Score,
    Scores,
    choose_best,
)

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.stopbench.libraries import LIBRARIES
from evalstop_lab.worlds.answers import Evaluator

PATIENCE = 3


class Rule(Protocol):
    """The interface of a rule; see the module's docstring."""

    def stop(self, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None) -> bool:
        """Return whether to stop the run after this eval."""


Factory = Callable[[float | None], Rule]


class PolicyRule:
    """A policy of EvalStop, with the checkpoint that the service would keep.

    `evaluator` answers the requests to evaluate now of a policy that makes them, before the next eval.
    """

    def __init__(self, policy: Policy, planned_steps: float | None) -> None:
        self._policy = policy.unobserved
        self._state = evalstop_detectors.start(self._policy)
        self._planned = planned_steps
        self._scores: list[Score] = []
        self.evaluator: Evaluator | None = None

    def stop(self, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None) -> bool:
        observations = _list_observations(self._planned, step, score, stderr, proxy, kl)
        self._state, _ = evalstop_detectors.advance(self._policy, self._state, observations)
        if self.evaluator is not None:
            for item in observations:
                self.evaluator.observe(item)
            request = evalstop_detectors.find_request(self._policy, self._state)
            if request is not None and request.step == step:
                answer = self.evaluator.answer(request, observations[-1].progress)
                self._state, _ = evalstop_detectors.step(self._policy, self._state, answer)
        if score is not None:
            self._scores.append(Score(step, score, stderr))
        return self._state.verdict.stops

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint that the service would keep."""
        addresses = dict.fromkeys((score.step for score in self._scores), "")
        best = choose_best(Scores().add_scores(self._scores).add_checkpoints(addresses))
        return None if best is None else best.step


class DetectorRule:
    """Stops when the evidence of a detector reaches a threshold; the detector sees what a policy would."""

    def __init__(self, detector: Detector[Any], threshold: float, planned_steps: float | None) -> None:
        self._detector, self._threshold, self._state = detector, threshold, detector.start()
        self._planned = planned_steps

    def stop(self, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None) -> bool:
        reached = False
        for item in _list_observations(self._planned, step, score, stderr, proxy, kl):
            if item.role in self._detector.roles:
                self._state, evidence = self._detector.step(self._state, item)
                reached = evidence.reaches(self._threshold)
        return reached


def _list_observations(
    planned: float | None, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None
) -> list[Observation]:
    """What a rule was told at this step, as a trainer would report it; the eval comes last."""
    progress = None if planned is None else min(1.0, step / planned)
    values = ((MetricRole.KL, kl, None), (MetricRole.PROXY, proxy, None), (MetricRole.EVAL, score, stderr))
    return [Observation(role, step, value, error, progress) for role, value, error in values if value is not None]


class _ByScore:
    """A rule that depends only on scores."""

    def __init__(self, planned_steps: float | None) -> None:
        self.start()

    def start(self) -> None:
        """Prepare for the first score."""

    def take(self, score: float) -> bool:
        """Add a score; return whether to stop."""
        raise NotImplementedError

    def stop(self, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None) -> bool:
        return score is not None and self.take(score)


class ZScore(_ByScore):
    """A typical alert of a metrics dashboard: the score is 3 standard deviations below the mean of the last 20."""

    def start(self) -> None:
        self._recent: deque[float] = deque(maxlen=20)

    def take(self, score: float) -> bool:
        """Compare with the earlier scores, at least five."""
        enough = len(self._recent) >= 5
        low = enough and score < statistics.fmean(self._recent) - 3 * statistics.stdev(self._recent)
        self._recent.append(score)
        return low


class TransformersRule(_ByScore):
    """transformers' EarlyStoppingCallback, as its Trainer calls it; those of Keras and Lightning decide alike."""

    def start(self) -> None:
        self._callback = importlib.import_module("transformers").EarlyStoppingCallback(early_stopping_patience=PATIENCE)
        self._args = SimpleNamespace(metric_for_best_model="eval_score", greater_is_better=True)
        self._state, self._control = SimpleNamespace(best_metric=None), SimpleNamespace(should_training_stop=False)

    def take(self, score: float) -> bool:
        """Call the callback, then update the best metric, as the Trainer does."""
        self._callback.on_evaluate(self._args, self._state, self._control, {"eval_score": score})
        if self._state.best_metric is None or score > self._state.best_metric:
            self._state.best_metric = score
        return bool(self._control.should_training_stop)


class OptunaRule(_ByScore):
    """Optuna's PatientPruner without a wrapped pruner: it prunes if the last scores contain no new maximum."""

    def start(self) -> None:
        optuna = importlib.import_module("optuna")
        with warnings.catch_warnings():  # that it is experimental
            warnings.simplefilter("ignore")
            self._pruner = optuna.pruners.PatientPruner(None, patience=PATIENCE)
        self._study = SimpleNamespace(direction=optuna.study.StudyDirection.MAXIMIZE)
        self._trial = SimpleNamespace(last_step=None, intermediate_values={})

    def take(self, score: float) -> bool:
        step = len(self._trial.intermediate_values)
        self._trial.last_step, self._trial.intermediate_values[step] = step, score
        return bool(self._pruner.prune(self._study, self._trial))


class RayRule(_ByScore):
    """Ray Tune's TrialPlateauStopper with its defaults: the standard deviation of the last 4 scores is below 0.01."""

    def start(self) -> None:
        self._stopper = importlib.import_module("ray.tune.stopper").TrialPlateauStopper(metric="score")

    def take(self, score: float) -> bool:
        return bool(self._stopper("trial", {"score": score}))


JUDGED_POLICIES = {
    **POLICIES,
    **{
        f"{name}, evaluate now": asking
        for name, policy in POLICIES.items()
        if (asking := policy.with_evaluator(0.0)) is not policy
    },
}
"""The shipped policies, without and with paired evaluations on request."""

SHIPPED_DETECTORS = {
    name: (detector(), stop_at)
    for name, detector in DETECTORS.items()
    if name != "non_finite" and (stop_at := detector().thresholds.stop_at) is not None
}
"""The detectors of the catalog that stop by themselves, at the thresholds that they state."""

BUILT_IN: Mapping[str, tuple[str | None, Factory]] = {
    **{f"EvalStop {name}": (None, partial(PolicyRule, policy)) for name, policy in JUDGED_POLICIES.items()},
    **{name: (None, partial(DetectorRule, *contender)) for name, contender in SHIPPED_DETECTORS.items()},
    "transformers EarlyStoppingCallback": ("transformers", TransformersRule),
    "Optuna PatientPruner": ("optuna", OptunaRule),
    "Ray TrialPlateauStopper": ("ray", RayRule),
    **{name: (name.split()[0], partial(DetectorRule, *contender)) for name, contender in LIBRARIES.items()},
    "z-score of 20": (None, ZScore),
}
"""The built-in rules, with the library that each requires."""


def is_installed(name: str) -> bool:
    """Whether the library of a built-in rule is installed."""
    library, _ = BUILT_IN[name]
    return library is None or importlib.util.find_spec(library) is not None


@lru_cache
def load_rule(name: str) -> Factory:
    """Return a built-in rule by name, or the class at `path.py:Name`.

    Raises UnusableArguments if the file or class does not exist or cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name][1]
    path, _, class_name = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("stopbench_rule", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise UnusableArguments(f"{name!r} is not a rule; give path.py:Name with an existing Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UnusableArguments(f"{path} cannot be imported: {error!r}.") from error
    rule = getattr(module, class_name, None)
    if not callable(getattr(rule, "stop", None)):
        raise UnusableArguments(f"{path} has no class {class_name!r} with a method `stop`.")
    return cast(Factory, rule)
