"""From passages to a model: boosted stumps of scikit-learn, monotone by construction, written out as step functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from evalstop_detectors.detectors.fusion import CALMING, FEATURES, Feature, FusionModel, StepFunction
from numpy.typing import NDArray
from scipy import special

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.fusion.passages import Matrix, Passage

try:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from threadpoolctl import threadpool_limits
except ImportError:
    HistGradientBoostingClassifier = None

EVALS_OF_A_RUN = 50
PARAMETERS: dict[str, Any] = {
    "learning_rate": 0.1,
    "max_iter": 300,
    "max_leaf_nodes": 2,
    "min_samples_leaf": 50,
    "l2_regularization": 1.0,
    "max_bins": 255,
    "early_stopping": False,
    "random_state": 0,
}


def rows(passages: Sequence[Passage]) -> tuple[Matrix, NDArray[np.bool_], Matrix]:
    """Features, targets and weights of some evals of each run, evenly spaced; every run weighs the same."""
    values, past, weights = [], [], []
    for item in passages:
        if count := len(item.steps):
            chosen = np.unique(np.linspace(0, count - 1, min(EVALS_OF_A_RUN, count)).round().astype(int))
            values.append(item.values[chosen])
            past.append(item.past[chosen])
            weights.append(np.full(len(chosen), 1 / len(chosen)))
    if not values or len(np.unique(np.concatenate(past))) < 2:
        raise UnusableArguments("There must be evals before a turn and after one; give runs of both kinds.")
    weight = np.concatenate(weights)
    return np.concatenate(values), np.concatenate(past), weight * len(weight) / weight.sum()


def fit(passages: Sequence[Passage]) -> Any:
    """Fit scikit-learn's classifier; raises UnusableArguments if scikit-learn is missing."""
    if HistGradientBoostingClassifier is None:
        raise UnusableArguments("Fitting needs scikit-learn: pip install 'evalstop-lab[fusion]'.")
    values, past, weights = rows(passages)
    constraints = [-1 if name in CALMING else 1 for name in FEATURES]
    classifier = HistGradientBoostingClassifier(monotonic_cst=constraints, **PARAMETERS)
    with threadpool_limits(1):  # its threads wait in a loop for each other, and other processes have the other cores
        return classifier.fit(values, past, sample_weight=weights)


def exported(classifier: Any) -> FusionModel:
    """The classifier as a model: its stumps, each on one feature, added up to a step function a feature."""
    log_odds = float(np.ravel(classifier._baseline_prediction)[0])
    stumps: dict[Feature, list[tuple[float, float]]] = {}
    for (tree,) in classifier._predictors:
        root = tree.nodes[0]
        if root["is_leaf"]:
            log_odds += float(root["value"])
            continue
        left, right = (float(tree.nodes[int(root[side])]["value"]) for side in ("left", "right"))
        log_odds += left
        stumps.setdefault(FEATURES[int(root["feature_idx"])], []).append((float(root["num_threshold"]), right - left))
    functions = (_step_function(name, stumps[name]) for name in FEATURES if name in stumps)
    return FusionModel(log_odds, tuple(functions))


def log_odds(model: FusionModel, values: Matrix) -> Matrix:
    """The model's log-odds of many rows of `FEATURES`."""
    total = np.full(len(values), model.log_odds)
    for function in model.functions:
        index = np.searchsorted(function.at, values[:, FEATURES.index(function.feature)], side="left")
        total += np.asarray(function.log_odds)[index]
    return total


def posteriors(model: FusionModel, values: Matrix) -> Matrix:
    """The model's probabilities of many rows."""
    return np.asarray(special.expit(log_odds(model, values)))


def _step_function(name: Feature, stumps: Sequence[tuple[float, float]]) -> StepFunction:
    """A rise at each threshold; those of one threshold together."""
    rises: dict[float, float] = {}
    for at, rise in stumps:
        rises[at] = rises.get(at, 0.0) + rise
    ordered = sorted(rises)
    return StepFunction(name, tuple(ordered), (0.0, *np.cumsum([rises[at] for at in ordered]).tolist()))
