"""The toy task that the demo trains on: its policy, its rewards, and its trainer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.rlhf.policy import Floats, Policy, Task, Texts, draw_policy, repeat_prompts
from evalstop_lab.rlhf.rewards import (
    FLUENT_UP_TO,
    Comparisons,
    Gold,
    RewardModel,
    draw_comparisons,
    draw_gold,
    fit_bradley_terry,
    standardize_scores,
)
from evalstop_lab.rlhf.trainer import (
    PRESETS,
    Config,
    Eval,
    Moments,
    Trainer,
    apply_adam,
    average_over_prompts,
    compute_advantages,
    hasten_run,
)

SMALL = Config(
    seed=3,
    steps=40,
    eval_every=10,
    learning_rate=0.02,
    kl_coefficient=0.1,
    comparisons=200,
    label_noise=0.1,
    samples_per_prompt=8,
    eval_samples_per_prompt=16,
)


def test_baseline_leaves_the_gradient_unbiased() -> None:
    """The expected estimate, over all triples of texts, is the exact policy gradient."""
    task = Task(prompts=1, length=2, vocabulary=2)
    policy, texts = draw_policy(task, 1.0, np.random.default_rng(0)), list_every_text(task)
    probability, reward = np.exp(policy.log_likelihood(texts)), np.array([1.0, -2.0, 0.5, 4.0])
    exact = policy.score_gradient(texts, probability * reward)
    expected = np.zeros_like(exact)
    for drawn in map(list, itertools.product(range(4), repeat=3)):
        weights = compute_advantages(reward[drawn][None])[0] / 3
        group = Texts(texts.prompts[drawn], texts.tokens[drawn])
        expected += probability[drawn].prod() * policy.score_gradient(group, weights)
    assert expected == pytest.approx(exact)


def test_updates_follow_adam() -> None:
    """Three updates agree with Adam's equations for one parameter."""
    parameters, moments = np.array([1.0]), Moments.zero(1)
    value, mean, square = 1.0, 0.0, 0.0
    for count, gradient in enumerate([0.5, -2.0, 0.1], start=1):
        parameters, moments = apply_adam(parameters, np.array([gradient]), moments, 0.1)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        value += 0.1 * (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)) ** 0.5 + 1e-8)
    assert parameters == pytest.approx([value])


def test_standard_errors_match_repeated_evals() -> None:
    """With fixed prompts, the standard error equals the standard deviation of means over repeated draws."""
    rng = np.random.default_rng(1)
    prompt_means, deviations = np.array([[0.0], [5.0]]), np.array([[1.0], [3.0]])
    repeated = [average_over_prompts(prompt_means + deviations * rng.normal(size=(2, 25))) for _ in range(2000)]
    means, errors = np.array(repeated).T
    assert errors.mean() == pytest.approx(means.std(), rel=0.06)
    assert means.mean() == pytest.approx(2.5, abs=0.05)


def test_evals_come_evenly_and_the_first_before_any_training() -> None:
    """There is an eval at step 0, where the KL is 0, and one every `eval_every` steps to the end."""
    log = list(Trainer(SMALL).evals())
    assert [logged.step for logged in log] == [0, 10, 20, 30, 40]
    assert log[0].kl == 0.0
    assert log[-1].kl > 0.0


@pytest.mark.parametrize("pause", [0, 1, 10, 25, 40])
def test_resumed_run_continues_bit_for_bit(pause: int) -> None:
    """Wherever a run is interrupted, a new trainer with its state logs exactly the rest."""
    whole = list(Trainer(SMALL).evals())
    first = Trainer(SMALL)
    before = list(first.evals(interrupted=lambda: first.state.step == pause))
    assert first.state.step == pause
    second = Trainer(SMALL, first.state)
    assert before + list(second.evals()) == whole
    assert second.state.step == SMALL.steps


def test_evals_do_not_disturb_training() -> None:
    """The policy does not depend on the number and size of evals."""
    often, seldom = Trainer(replace(SMALL, eval_every=1, eval_samples_per_prompt=50)), Trainer(SMALL)
    for trainer in (often, seldom):
        for _ in trainer.evals():
            pass
    assert (often.state.policy.parameters == seldom.state.policy.parameters).all()


TASK = Task(prompts=2, length=3, vocabulary=3)


def compute_numeric_gradient(function: Callable[[Floats], float], point: Floats, width: float = 1e-6) -> Floats:
    """The gradient of `function` by central differences, one coordinate at a time."""
    steps = width * np.eye(len(point))
    return np.array([(function(point + step) - function(point - step)) / (2 * width) for step in steps])


def build_policy(seed: int, scale: float = 1.0, task: Task = TASK) -> Policy:
    return draw_policy(task, scale, np.random.default_rng(seed))


def group_by_prompt(values: Floats) -> Floats:
    return values.reshape(TASK.prompts, -1)


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
def test_kl_equals_its_sum_over_all_texts(scale: float) -> None:
    """The forward sweep gives the same KL as enumeration."""
    policy, initial, texts = build_policy(3, scale), build_policy(4, scale), list_every_text(TASK)
    log_p, log_q = group_by_prompt(policy.log_likelihood(texts)), group_by_prompt(initial.log_likelihood(texts))
    assert policy.kl(initial) == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


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


def test_gold_is_standardized_over_initial_texts() -> None:
    """Over new texts of the initial policy, content and surprise have mean 0 and standard deviation 1."""
    rng = np.random.default_rng(0)
    initial = draw_policy(Task(), 1.6, rng)
    gold = draw_gold(initial, rng)
    texts = initial.sample(repeat_prompts(Task(), 1000), rng)
    for part in (gold.content(texts), gold.surprise(texts)):
        assert part.mean() == pytest.approx(0.0, abs=0.1)
        assert part.std() == pytest.approx(1.0, abs=0.1)


def test_fluency_penalizes_only_surprising_texts() -> None:
    """Gold equals content for a text that is not surprising; the penalty grows with the surprise of a text."""
    rng = np.random.default_rng(1)
    initial = draw_policy(Task(), 1.6, rng)
    gold = draw_gold(initial, rng)
    other_texts = draw_policy(Task(), 0.5, rng).sample(repeat_prompts(Task(), 200), rng)
    own_texts = initial.sample(repeat_prompts(Task(), 200), rng)
    texts = Texts(
        np.concatenate([own_texts.prompts, other_texts.prompts]), np.concatenate([own_texts.tokens, other_texts.tokens])
    )
    surprise, penalty = gold.surprise(texts), gold.content(texts) - gold.score(texts)
    assert penalty[surprise <= FLUENT_UP_TO] == pytest.approx(0.0)
    order = np.argsort(surprise)
    assert (np.diff(penalty[order]) >= -1e-9).all()
    assert (surprise > FLUENT_UP_TO).sum() > 100


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


def test_fit_equals_slow_gradient_ascent() -> None:
    """Newton's method gives the same weights as gradient ascent."""
    initial, gold, rng = draw_policy_and_gold()
    comparisons = draw_comparisons(initial, gold, 40, 0.2, rng)
    assert fit_bradley_terry(TINY, comparisons).weights == pytest.approx(fit_slowly(TINY, comparisons), abs=1e-6)


def test_label_noise_is_the_share_of_pairs_labeled_against_gold() -> None:
    """With a label noise of 0.25, about a quarter of the pairs are labeled against gold."""
    initial, gold, rng = draw_policy_and_gold(Task())
    comparisons = draw_comparisons(initial, gold, 4000, 0.25, rng)
    against = (gold.score(comparisons.preferred) < gold.score(comparisons.rejected)).mean()
    assert against == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 4000))


def test_standardizing_changes_only_the_scale() -> None:
    """A standardized model has mean 0 and standard deviation 1 over the given texts, and ranks texts as before."""
    initial, _, rng = draw_policy_and_gold()
    model, texts = RewardModel(TINY, rng.normal(size=6)), initial.sample(repeat_prompts(TINY, 100), rng)
    scores = standardize_scores(model, texts).score(texts)
    assert scores.mean() == pytest.approx(0.0, abs=1e-12)
    assert scores.std() == pytest.approx(1.0)
    assert np.corrcoef(scores, model.score(texts))[0, 1] == pytest.approx(1.0)


def list_every_text(task: Task) -> Texts:
    """All texts for every prompt, in order of prompts."""
    texts = np.array(list(itertools.product(range(task.vocabulary), repeat=task.length)))
    return Texts(np.repeat(np.arange(task.prompts), len(texts)), np.tile(texts, (task.prompts, 1)))


SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in (1, 2, 3, 4, 5)))
WINDOW = 5


def train(preset: str, seed: int) -> list[Eval]:
    return list(Trainer(hasten_run(replace(PRESETS[preset], seed=seed), 20)).evals())


def compute_window_means(values: list[float]) -> list[float]:
    return [fmean(values[start : start + WINDOW]) for start in range(len(values) - WINDOW + 1)]


def compute_difference_stderr(log: list[Eval], start: int) -> float:
    """The standard error of the difference of mean gold between the last window and the window at `start`."""
    errors = [logged.gold_stderr for logged in log[start : start + WINDOW] + log[-WINDOW:]]
    return math.hypot(*errors) / WINDOW


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_gold_of_overoptimizes_peaks_and_falls_while_the_proxy_climbs(seed: int) -> None:
    """Gold rises, then loses at least 30 % of its gain and three standard errors, while the proxy keeps rising."""
    log = train("overoptimizes", seed)
    gold, proxy = (
        compute_window_means([logged.gold for logged in log]),
        compute_window_means([logged.proxy for logged in log]),
    )
    peak = max(range(len(gold)), key=gold.__getitem__)
    gain, drop = gold[peak] - log[0].gold, gold[peak] - gold[-1]
    assert gain > 10 * compute_difference_stderr(log, peak)
    assert drop > 3 * compute_difference_stderr(log, peak)
    assert drop > 0.3 * gain
    assert proxy[-1] > proxy[peak] + 0.5
    assert 5 <= peak <= len(gold) * 2 // 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_gold_of_healthy_rises_and_stays(seed: int) -> None:
    """Gold gains at least one standard deviation, and the last window is within noise of the best one."""
    log = train("healthy", seed)
    gold = compute_window_means([logged.gold for logged in log])
    peak = max(range(len(gold)), key=gold.__getitem__)
    # By selection alone, the best of about fifty windows is two to three standard errors above its true mean.
    assert gold[peak] - gold[-1] <= 5 * compute_difference_stderr(log, peak)
    assert gold[-1] - log[0].gold > 1.0


@pytest.mark.slow
def test_factor_must_divide_the_steps_between_evals() -> None:
    """Another factor is refused, and the message has the number of steps."""
    with pytest.raises(UnusableArguments, match="400"):
        hasten_run(PRESETS["healthy"], 3)
