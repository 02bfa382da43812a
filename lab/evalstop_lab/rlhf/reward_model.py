"""The proxy: a linear reward model fitted by Bradley-Terry to noisy comparisons of the initial policy's texts.

P(first preferred to second) = sigmoid(score(first) - score(second)), fitted by Newton's method to the maximum of the
posterior under a Gaussian prior on the weights. One weight for each (position, token): it can see neither the prompt
nor how tokens go together, which is what gives it less capacity than the gold reward it stands in for.

Newton's equations are solved by conjugate gradients over gathers and sums. A matrix product would be shorter, but its
last bits depend on how many threads the BLAS has, and a run's must not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from evalstop_lab.rlhf.gold import Gold
from evalstop_lab.rlhf.policy import Policy
from evalstop_lab.rlhf.task import Floats, Task, Texts, position_token

PRIOR_PRECISION = 1.0
NEWTON_STEPS = 50
CONVERGED = 1e-9
SOLVED = 1e-6


@dataclass(frozen=True)
class Comparisons:
    """Pairs of texts that answer the same prompt; the labeler preferred the first of each pair."""

    preferred: Texts
    rejected: Texts


@dataclass(frozen=True, eq=False)
class RewardModel:
    """A score that is a sum over the text's tokens of `weights`, of shape (length * vocabulary,)."""

    task: Task
    weights: Floats
    offset: float = 0.0

    def score(self, texts: Texts) -> Floats:
        """Return the proxy reward of each text: (n,)."""
        return np.asarray(self.weights[position_token(self.task, texts.tokens)].sum(axis=1) - self.offset)


def compare(initial: Policy, gold: Gold, count: int, label_noise: float, rng: np.random.Generator) -> Comparisons:
    """Have gold label `count` pairs of the initial policy's texts, a share `label_noise` of them the wrong way."""
    prompts = rng.integers(initial.task.prompts, size=count)
    first, second = initial.sample(prompts, rng), initial.sample(prompts, rng)
    right = rng.random(count) >= label_noise
    first_preferred = ((gold.score(first) > gold.score(second)) == right)[:, None]
    return Comparisons(
        preferred=Texts(prompts, np.where(first_preferred, first.tokens, second.tokens)),
        rejected=Texts(prompts, np.where(first_preferred, second.tokens, first.tokens)),
    )


def fit_bradley_terry(task: Task, comparisons: Comparisons) -> RewardModel:
    """Return the reward model of greatest posterior probability given the comparisons."""
    preferred = position_token(task, comparisons.preferred.tokens)
    rejected = position_token(task, comparisons.rejected.tokens)
    size = task.length * task.vocabulary

    def margins(weights: Floats) -> Floats:
        return np.asarray(weights[preferred].sum(axis=1) - weights[rejected].sum(axis=1))

    def gathered(by_margin: Floats) -> Floats:
        """Carry a value for each pair back to the weights: the transpose of `margins`."""
        spread = np.repeat(by_margin, task.length)
        found = np.bincount(preferred.ravel(), weights=spread, minlength=size)
        return np.asarray(found - np.bincount(rejected.ravel(), weights=spread, minlength=size), dtype=np.float64)

    def curved(doubt: Floats, weights: Floats) -> Floats:
        return gathered(doubt * margins(weights)) + PRIOR_PRECISION * weights

    weights = np.zeros(size)
    for _ in range(NEWTON_STEPS):
        certainty = 1.0 / (1.0 + np.exp(-margins(weights)))
        gradient = gathered(1.0 - certainty) - PRIOR_PRECISION * weights
        if np.abs(gradient).max() < CONVERGED:
            break
        doubt = certainty * (1.0 - certainty)
        weights = weights + _solve(partial(curved, doubt), gradient)
    return RewardModel(task, weights)


def standardized(model: RewardModel, ordinary: Texts) -> RewardModel:
    """Return the same order of preference, with mean 0 and standard deviation 1 over the given texts."""
    scores = model.score(ordinary)
    deviation = float(scores.std())
    return RewardModel(model.task, model.weights / deviation, (float(scores.mean()) + model.offset) / deviation)


def _solve(curvature: Callable[[Floats], Floats], target: Floats) -> Floats:
    """Solve `curvature(x) = target` by conjugate gradients; `curvature` is linear, symmetric and positive."""
    solution, residual = np.zeros_like(target), target
    direction, length = residual, float((residual**2).sum())
    enough = length * SOLVED**2
    for _ in range(len(target)):
        bent = curvature(direction)
        stride = length / float((direction * bent).sum())
        solution = solution + stride * direction
        residual = residual - stride * bent
        shorter = float((residual**2).sum())
        if shorter <= enough:
            break
        direction, length = residual + shorter / length * direction, shorter
    return solution
