"""The rules that StopBench judges: yours, EvalStop's policies, and the early stopping of other libraries, unmodified.

A rule is a class; one object of it follows one run:

    class ThreeDeclines:
        def __init__(self, planned_steps):        # None where the run tells no length
            self.last, self.declines = None, 0

        def stop(self, step, score, stderr, proxy, kl):   # after each eval; higher scores are better
            if score is None:                     # the eval is missing; so may be stderr, proxy and kl
                return False
            self.declines = self.declines + 1 if self.last is not None and score < self.last else 0
            self.last = score
            return self.declines >= 3

It is asked after each eval but the last. With a property `best_step` it also says which checkpoint it keeps; else that
of the highest score so far counts.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import evalstop_detectors
from evalstop_detectors import POLICIES, BestSoFar, MetricRole, Observation, Policy, Score, SmoothedMaximum

from evalstop_lab.errors import UnusableArguments

PATIENCE = 3


class Rule(Protocol):
    """What a rule offers, see the module's docstring."""

    def stop(self, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None) -> bool:
        """Whether the run is to be stopped here."""


Factory = Callable[[float | None], Rule]


class PolicyRule:
    """A policy of EvalStop's, with the checkpoint that the service keeps."""

    def __init__(self, policy: Policy, planned_steps: float | None) -> None:
        self._policy, self._state = policy, evalstop_detectors.start(policy)
        self._planned = planned_steps
        self._best = BestSoFar(SmoothedMaximum())

    def stop(self, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None) -> bool:
        """See `Rule`."""
        progress = None if self._planned is None else min(1.0, step / self._planned)
        values = ((MetricRole.KL, kl, None), (MetricRole.PROXY, proxy, None), (MetricRole.EVAL, score, stderr))
        seen = [Observation(role, step, value, error, progress) for role, value, error in values if value is not None]
        self._state, _ = evalstop_detectors.advance(self._policy, self._state, seen)
        if score is not None:
            self._best.add(Score(step, score, stderr))
            self._best.saved(step)
        return self._state.verdict.stops

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint that the service would keep."""
        best = self._best.best()
        return None if best is None else best.step


class _ByScore:
    """A rule that looks at scores alone."""

    def __init__(self, planned_steps: float | None) -> None:
        self.start()

    def start(self) -> None:
        """Prepare for the first score."""

    def take(self, score: float) -> bool:
        """Take in a score; whether to stop."""
        raise NotImplementedError

    def stop(self, step: int, score: float | None, stderr: float | None, proxy: float | None, kl: float | None) -> bool:
        """See `Rule`."""
        return score is not None and self.take(score)


class ZScore(_ByScore):
    """An alert as one sets it up on a metrics dashboard: the score lies 3 standard deviations below the last 20."""

    def start(self) -> None:
        """Remember 20 scores."""
        self._recent: deque[float] = deque(maxlen=20)

    def take(self, score: float) -> bool:
        """Compare with the scores before, of which there have to be five."""
        enough = len(self._recent) >= 5
        low = enough and score < statistics.fmean(self._recent) - 3 * statistics.stdev(self._recent)
        self._recent.append(score)
        return low


class TransformersRule(_ByScore):
    """transformers' EarlyStoppingCallback, as its Trainer calls it."""

    def start(self) -> None:
        """Patience 3."""
        self._callback = _import("transformers").EarlyStoppingCallback(early_stopping_patience=PATIENCE)
        self._args = SimpleNamespace(metric_for_best_model="eval_score", greater_is_better=True)
        self._state, self._control = SimpleNamespace(best_metric=None), SimpleNamespace(should_training_stop=False)

    def take(self, score: float) -> bool:
        """Call it, then note the best metric, which the Trainer does."""
        self._callback.on_evaluate(self._args, self._state, self._control, {"eval_score": score})
        if self._state.best_metric is None or score > self._state.best_metric:
            self._state.best_metric = score
        return bool(self._control.should_training_stop)


class KerasRule(_ByScore):
    """Keras' EarlyStopping, which counts evals as epochs."""

    def start(self) -> None:
        """Patience 3."""
        self._callback = _import("keras").callbacks.EarlyStopping(monitor="score", mode="max", patience=PATIENCE)
        self._model = SimpleNamespace(stop_training=False)
        self._callback.set_model(self._model)
        self._callback.on_train_begin()
        self._epoch = -1

    def take(self, score: float) -> bool:
        """End an epoch."""
        self._epoch += 1
        self._callback.on_epoch_end(self._epoch, {"score": score})
        return bool(self._model.stop_training)


class LightningRule(_ByScore):
    """Lightning's EarlyStopping."""

    def start(self) -> None:
        """Patience 3, which is its default."""
        callbacks, self._torch = _import("lightning.pytorch.callbacks"), _import("torch")
        self._callback = callbacks.EarlyStopping(
            monitor="score", mode="max", patience=PATIENCE, check_on_train_epoch_end=False
        )
        self._trainer = SimpleNamespace(
            callback_metrics={},
            fast_dev_run=False,
            should_stop=False,
            current_epoch=0,
            sanity_checking=False,
            state=SimpleNamespace(fn=_import("lightning.pytorch.trainer.states").TrainerFn.FITTING),
            strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),  # noqa: A006 - its name
        )

    def take(self, score: float) -> bool:
        """End a validation."""
        self._trainer.callback_metrics["score"] = self._torch.tensor(score, dtype=self._torch.float64)
        self._callback.on_validation_end(self._trainer, None)
        return bool(self._trainer.should_stop)


class OptunaRule(_ByScore):
    """Optuna's PatientPruner around nothing: it prunes when the last scores hold no new maximum."""

    def start(self) -> None:
        """Patience 3."""
        optuna = _import("optuna")
        with warnings.catch_warnings():  # it calls itself experimental
            warnings.simplefilter("ignore")
            self._pruner = optuna.pruners.PatientPruner(None, patience=PATIENCE)
        self._study = SimpleNamespace(direction=optuna.study.StudyDirection.MAXIMIZE)
        self._trial = SimpleNamespace(last_step=None, intermediate_values={})

    def take(self, score: float) -> bool:
        """Report the score and ask."""
        step = len(self._trial.intermediate_values)
        self._trial.last_step, self._trial.intermediate_values[step] = step, score
        return bool(self._pruner.prune(self._study, self._trial))


class RayRule(_ByScore):
    """Ray Tune's TrialPlateauStopper with its defaults: the last 4 scores lie within a deviation of 0.01."""

    def start(self) -> None:
        """One trial."""
        self._stopper = _import("ray.tune.stopper").TrialPlateauStopper(metric="score")

    def take(self, score: float) -> bool:
        """Report the score."""
        return bool(self._stopper("trial", {"score": score}))


BUILT_IN: Mapping[str, tuple[str | None, Factory]] = {
    **{f"EvalStop {name}": (None, partial(PolicyRule, policy)) for name, policy in POLICIES.items()},
    "transformers EarlyStoppingCallback": ("transformers", TransformersRule),
    "Keras EarlyStopping": ("keras", KerasRule),
    "Lightning EarlyStopping": ("lightning", LightningRule),
    "Optuna PatientPruner": ("optuna", OptunaRule),
    "Ray TrialPlateauStopper": ("ray", RayRule),
    "z-score of 20": (None, ZScore),
}
"""Rules that are there already, with the library that has to be installed for each."""


def is_installed(name: str) -> bool:
    """Whether the library that a built-in rule needs is there."""
    library, _ = BUILT_IN[name]
    return library is None or importlib.util.find_spec(library) is not None


@lru_cache
def load_rule(name: str) -> Factory:
    """A built-in rule by its name, or the class that `path.py:Name` says.

    Raises UnusableArguments when there is no such file or class, or it can't be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name][1]
    path, _, class_name = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("stopbench_rule", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise UnusableArguments(f"{name!r}: give a rule as path.py:Name, with a Python file that exists.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UnusableArguments(f"{path} can't be imported: {error!r}.") from error
    found = getattr(module, class_name, None)
    if not callable(getattr(found, "stop", None)):
        raise UnusableArguments(f"{path} has no class {class_name!r} with a method `stop`.")
    return cast(Factory, found)


def _import(module: str) -> Any:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    return importlib.import_module(module)
