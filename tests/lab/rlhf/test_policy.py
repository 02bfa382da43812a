"""The policy, compared with enumeration of all texts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from evalstop_lab.rlhf.policy import Floats, Policy, Task, Texts, draw_policy, repeat_prompts
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.rlhf.every_text import list_every_text

TASK = Task(prompts=2, length=3, vocabulary=3)


def compute_numeric_gradient(function: Callable[[Floats], float], point: Floats, width: float = 1e-6) -> Floats:
    """The gradient of `function` by central differences, one coordinate at a time."""
    steps = width * np.eye(len(point))
    return np.array([(function(point + step) - function(point - step)) / (2 * width) for step in steps])


def build_policy(seed: int, scale: float = 1.0, task: Task = TASK) -> Policy:
    return draw_policy(task, scale, np.random.default_rng(seed))


def group_by_prompt(values: Floats) -> Floats:
    return values.reshape(TASK.prompts, -1)


def test_probabilities_of_all_texts_sum_to_one() -> None:
    """For each prompt, the probabilities of all texts sum to one."""
    probabilities = np.exp(build_policy(seed=1).log_likelihood(list_every_text(TASK)))
    assert group_by_prompt(probabilities).sum(axis=1) == pytest.approx([1.0, 1.0])


def test_likelihood_follows_the_definition() -> None:
    """A text's likelihood is the product of softmaxes of bigram plus prompt logits."""
    policy = build_policy(seed=2)
    tables = policy.parameters.reshape(3, 4 + 2, 3)
    text, prompt, expected, previous = [2, 0, 1], 1, 0.0, 3
    for position, token in enumerate(text):
        logits = tables[position, previous] + tables[position, 4 + prompt]
        expected += logits[token] - np.log(np.exp(logits).sum())
        previous = token
    assert policy.log_likelihood(Texts(np.array([prompt]), np.array([text]))) == pytest.approx([expected])


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_kl_and_entropy_equal_their_sums_over_all_texts(scale: float) -> None:
    """The forward sweep gives the same KL and entropy as enumeration."""
    policy, initial, texts = build_policy(3, scale), build_policy(4, scale), list_every_text(TASK)
    log_p, log_q = group_by_prompt(policy.log_likelihood(texts)), group_by_prompt(initial.log_likelihood(texts))
    p = np.exp(log_p)
    assert policy.kl(initial) == pytest.approx((p * (log_p - log_q)).sum(axis=1).mean())
    assert policy.entropy() == pytest.approx(-(p * log_p).sum(axis=1).mean())


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 20.0))
def test_kl_is_never_negative_and_zero_to_itself(seed: int, scale: float) -> None:
    """KL to another policy is not negative, and KL to itself is zero."""
    policy = build_policy(seed, scale)
    assert policy.kl(policy) == 0.0
    assert policy.kl(build_policy(seed + 1, scale)) > -1e-9


def test_score_gradient_is_the_gradient_of_the_weighted_likelihood() -> None:
    """The gradient of a weighted sum of log-likelihoods agrees with central differences."""
    policy, rng = build_policy(seed=5), np.random.default_rng(6)
    texts, weights = policy.sample(repeat_prompts(TASK, 4), rng), rng.normal(size=8)

    def weighted(parameters: Floats) -> float:
        return float((weights * Policy(TASK, parameters).log_likelihood(texts)).sum())

    expected = compute_numeric_gradient(weighted, policy.parameters)
    assert policy.score_gradient(texts, weights) == pytest.approx(expected, abs=1e-6)


def test_policy_gradient_is_that_of_expected_reward_minus_kl() -> None:
    """With the rewards reward - c log(policy / initial) the expected gradient is that of E[reward] - c KL."""
    policy, initial, texts, price = build_policy(7), build_policy(8), list_every_text(TASK), 0.3
    reward = np.random.default_rng(9).normal(size=len(texts))

    def objective(parameters: Floats) -> float:
        moved = Policy(TASK, parameters)
        return float((np.exp(moved.log_likelihood(texts)) * reward).sum() / TASK.prompts - price * moved.kl(initial))

    log_p = policy.log_likelihood(texts)
    penalized = reward - price * (log_p - initial.log_likelihood(texts))
    gradient = policy.score_gradient(texts, np.exp(log_p) * penalized / TASK.prompts)
    assert gradient == pytest.approx(compute_numeric_gradient(objective, policy.parameters), abs=1e-6)


def test_sample_frequencies_match_likelihoods() -> None:
    """Over many samples, the frequency of each text is its likelihood, within five standard errors."""
    policy, texts, count = build_policy(seed=10), list_every_text(TASK), 40_000
    sample = policy.sample(repeat_prompts(TASK, count), np.random.default_rng(11))
    code = (sample.prompts * 3**3) + sample.tokens @ np.array([9, 3, 1])
    frequencies = np.bincount(code, minlength=len(texts))
    expected = count * np.exp(policy.log_likelihood(texts))
    assert (np.abs(frequencies - expected) < 5 * np.sqrt(expected + 1)).all()


def test_tokens_stay_in_the_vocabulary_with_large_logits() -> None:
    """A policy with very large logits samples only existing tokens, with finite likelihood."""
    policy = build_policy(seed=12, scale=1e4)
    sample = policy.sample(repeat_prompts(TASK, 100), np.random.default_rng(13))
    assert sample.tokens.min() >= 0
    assert sample.tokens.max() < TASK.vocabulary
    assert np.isfinite(policy.log_likelihood(sample)).all()
