"""The proxy: its comparisons, its Bradley-Terry fit compared with a slow reference, and its scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
from evalstop_lab.rlhf.gold import Gold, draw_gold
from evalstop_lab.rlhf.policy import Floats, Policy, Task, draw_policy, index_tokens, repeat_prompts
from evalstop_lab.rlhf.reward_model import (
    Comparisons,
    RewardModel,
    draw_comparisons,
    fit_bradley_terry,
    standardize_scores,
)
from hypothesis import given, settings
from hypothesis import strategies as st

TINY = Task(prompts=2, length=2, vocabulary=3)


def draw_policy_and_gold(task: Task = TINY, seed: int = 0) -> tuple[Policy, Gold, np.random.Generator]:
    rng = np.random.default_rng(seed)
    initial = draw_policy(task, 1.0, rng)
    return initial, draw_gold(initial, rng), rng


def fit_slowly(task: Task, comparisons: Comparisons) -> list[float]:
    """Maximize the log-posterior by gradient ascent in small steps."""
    weights = [0.0] * (task.length * task.vocabulary)
    pairs = list(zip(comparisons.preferred.tokens.tolist(), comparisons.rejected.tokens.tolist(), strict=True))
    for _ in range(1500):
        gradient = [-weight for weight in weights]
        for preferred, rejected in pairs:
            wins = [position * task.vocabulary + token for position, token in enumerate(preferred)]
            losses = [position * task.vocabulary + token for position, token in enumerate(rejected)]
            margin = sum(weights[index] for index in wins) - sum(weights[index] for index in losses)
            surprise = 1.0 / (1.0 + math.exp(margin))
            for index in wins:
                gradient[index] += surprise
            for index in losses:
                gradient[index] -= surprise
        weights = [weight + 0.05 * by for weight, by in zip(weights, gradient, strict=True)]
    return weights


def compute_log_posterior_gradient(task: Task, comparisons: Comparisons, weights: Floats) -> Floats:
    """The gradient of the log-posterior, computed with a dense feature matrix."""
    features = np.zeros((len(comparisons.preferred), task.length * task.vocabulary))
    for texts, sign in ((comparisons.preferred, 1.0), (comparisons.rejected, -1.0)):
        for row, columns in enumerate(index_tokens(task, texts.tokens)):
            features[row, columns] += sign
    return np.asarray(features.T @ (1.0 / (1.0 + np.exp(features @ weights))) - weights)


def test_fit_equals_slow_gradient_ascent() -> None:
    """Newton's method with conjugate gradients gives the same weights as gradient ascent."""
    initial, gold, rng = draw_policy_and_gold()
    comparisons = draw_comparisons(initial, gold, 40, 0.2, rng)
    assert fit_bradley_terry(TINY, comparisons).weights == pytest.approx(fit_slowly(TINY, comparisons), abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 400), noise=st.sampled_from([0.0, 0.25, 0.5]))
def test_fit_is_where_the_posterior_is_flat(seed: int, count: int, noise: float) -> None:
    """The gradient of the log-posterior is 0 at the fit, for any number of pairs and any label noise."""
    task = Task(prompts=2, length=4, vocabulary=5)
    initial, gold, rng = draw_policy_and_gold(task, seed)
    comparisons = draw_comparisons(initial, gold, count, noise, rng)
    weights = fit_bradley_terry(task, comparisons).weights
    assert np.abs(compute_log_posterior_gradient(task, comparisons, weights)).max() < 1e-8


def test_without_noise_labels_agree_with_gold() -> None:
    """Without label noise no pair is labeled against gold; with a noise of 1 every pair is."""
    initial, gold, rng = draw_policy_and_gold(Task())
    for noise, sign in ((0.0, 1.0), (1.0, -1.0)):
        comparisons = draw_comparisons(initial, gold, 500, noise, rng)
        assert (sign * (gold.score(comparisons.preferred) - gold.score(comparisons.rejected)) >= 0).all()


def test_label_noise_is_the_share_of_pairs_labeled_against_gold() -> None:
    """With a label noise of 0.25, about a quarter of the pairs are labeled against gold."""
    initial, gold, rng = draw_policy_and_gold(Task())
    comparisons = draw_comparisons(initial, gold, 4000, 0.25, rng)
    against = (gold.score(comparisons.preferred) < gold.score(comparisons.rejected)).mean()
    assert against == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 4000))


def test_more_and_cleaner_comparisons_give_a_better_proxy() -> None:
    """On new texts, a proxy of many clean comparisons is closer to gold than one of few noisy comparisons."""
    initial, gold, rng = draw_policy_and_gold(Task())
    new_texts = initial.sample(repeat_prompts(Task(), 250), rng)
    agreement = []
    for count, noise in ((8000, 0.0), (500, 0.25)):
        proxy = fit_bradley_terry(Task(), draw_comparisons(initial, gold, count, noise, rng))
        agreement.append(float(np.corrcoef(proxy.score(new_texts), gold.score(new_texts))[0, 1]))
    assert 0.95 > agreement[0] > agreement[1] + 0.1 > 0.2


def test_standardizing_changes_only_the_scale() -> None:
    """A standardized model has mean 0 and standard deviation 1 over the given texts, and ranks texts as before."""
    initial, _, rng = draw_policy_and_gold()
    model, texts = RewardModel(TINY, rng.normal(size=6)), initial.sample(repeat_prompts(TINY, 100), rng)
    scores = standardize_scores(model, texts).score(texts)
    assert scores.mean() == pytest.approx(0.0, abs=1e-12)
    assert scores.std() == pytest.approx(1.0)
    assert np.corrcoef(scores, model.score(texts))[0, 1] == pytest.approx(1.0)
