"""The proxy: a linear reward model fitted by Bradley-Terry to noisy comparisons of the initial policy's texts.

P(first preferred to second) = sigmoid(score(first) - score(second)), fitted by Newton's method to the maximum of the
posterior under a Gaussian prior on the weights. It has one weight per (position, token), and depends neither on the
prompt nor on combinations of tokens, so it has less capacity than the gold reward that it approximates.

Newton's equations are solved by conjugate gradients with gathers and sums. A matrix product would be shorter, but its
last bits depend on the number of BLAS threads, and runs must be reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from evalstop_lab.rlhf.gold import Gold
from evalstop_lab.rlhf.policy import Floats, Policy, Task, Texts, index_tokens

PRIOR_PRECISION = 1.0
NEWTON_STEPS = 50
CONVERGED = 1e-9
SOLVED = 1e-6


@dataclass(frozen=True)
class Comparisons:
    """Pairs of texts for the same prompt: what the labeler preferred, and the other."""

    preferred: Texts
    rejected: Texts


@dataclass(frozen=True, eq=False)
class RewardModel:
    """Scores a text by the sum of the `weights` of its tokens; `weights` has the shape (length * vocabulary,)."""

    task: Task
    weights: Floats
    offset: float = 0.0

    def score(self, texts: Texts) -> Floats:
        """Return the proxy reward of each text: (n,)."""
        return np.asarray(self.weights[index_tokens(self.task, texts.tokens)].sum(axis=1) - self.offset)


def draw_comparisons(
    initial: Policy, gold: Gold, count: int, label_noise: float, rng: np.random.Generator
) -> Comparisons:
    """Draw `count` pairs of the initial policy's texts, labeled by gold; a share `label_noise` of labels is wrong."""
    prompts = rng.integers(initial.task.prompts, size=count)
    first, second = initial.sample(prompts, rng), initial.sample(prompts, rng)
    right = rng.random(count) >= label_noise
    first_preferred = ((gold.score(first) > gold.score(second)) == right)[:, None]
    return Comparisons(
        preferred=Texts(prompts, np.where(first_preferred, first.tokens, second.tokens)),
        rejected=Texts(prompts, np.where(first_preferred, second.tokens, first.tokens)),
    )


def fit_bradley_terry(task: Task, comparisons: Comparisons) -> RewardModel:
    """Return the maximum a posteriori reward model for the comparisons."""
    preferred = index_tokens(task, comparisons.preferred.tokens)
    rejected = index_tokens(task, comparisons.rejected.tokens)
    size = task.length * task.vocabulary

    def compute_margins(weights: Floats) -> Floats:
        return np.asarray(weights[preferred].sum(axis=1) - weights[rejected].sum(axis=1))

    def sum_by_weight(by_pair: Floats) -> Floats:
        """Sum a value of each pair by weight: the transpose of `compute_margins`."""
        by_token = np.repeat(by_pair, task.length)
        sums = np.bincount(preferred.ravel(), weights=by_token, minlength=size)
        return np.asarray(sums - np.bincount(rejected.ravel(), weights=by_token, minlength=size), dtype=np.float64)

    def multiply_hessian(variance: Floats, weights: Floats) -> Floats:
        return sum_by_weight(variance * compute_margins(weights)) + PRIOR_PRECISION * weights

    weights = np.zeros(size)
    for _ in range(NEWTON_STEPS):
        probability = 1.0 / (1.0 + np.exp(-compute_margins(weights)))
        gradient = sum_by_weight(1.0 - probability) - PRIOR_PRECISION * weights
        if np.abs(gradient).max() < CONVERGED:
            break
        variance = probability * (1.0 - probability)
        weights = weights + _solve(partial(multiply_hessian, variance), gradient)
    return RewardModel(task, weights)


def standardize_scores(model: RewardModel, texts: Texts) -> RewardModel:
    """Shift and scale the model's scores to mean 0 and standard deviation 1 over these texts."""
    scores = model.score(texts)
    deviation = float(scores.std())
    return RewardModel(model.task, model.weights / deviation, (float(scores.mean()) + model.offset) / deviation)


def _solve(multiply: Callable[[Floats], Floats], target: Floats) -> Floats:
    """Solve `multiply(x) = target` by conjugate gradients; `multiply` is linear, symmetric and positive definite."""
    solution, residual = np.zeros_like(target), target
    direction, norm = residual, float((residual**2).sum())
    tolerance = norm * SOLVED**2
    for _ in range(len(target)):
        product = multiply(direction)
        stride = norm / float((direction * product).sum())
        solution = solution + stride * direction
        residual = residual - stride * product
        new_norm = float((residual**2).sum())
        if new_norm <= tolerance:
            break
        direction, norm = residual + new_norm / norm * direction, new_norm
    return solution
