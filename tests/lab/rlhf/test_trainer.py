"""The trainer: an unbiased gradient, correct standard errors, and runs that repeat and resume bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from evalstop_lab.rlhf.policy import Task, Texts, draw_policy
from evalstop_lab.rlhf.trainer import Config, Moments, Trainer, apply_adam, average_over_prompts, compute_advantages

from tests.lab.rlhf.every_text import list_every_text

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


def test_baseline_is_the_mean_of_the_others() -> None:
    """Each text is compared with the mean reward of its prompt's other texts."""
    assert compute_advantages(np.array([[1.0, 2.0, 6.0]])) == pytest.approx(np.array([[-3.0, -1.5, 4.5]]))


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


def test_another_seed_gives_another_log() -> None:
    """Two seeds log different values."""
    assert list(Trainer(replace(SMALL, seed=4)).evals()) != list(Trainer(SMALL).evals())


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


def test_training_raises_the_penalized_proxy() -> None:
    """A few steps raise the proxy by more than its standard error."""
    first, *_, last = Trainer(replace(SMALL, samples_per_prompt=32, eval_samples_per_prompt=64)).evals()
    assert last.proxy > first.proxy + 5 * (first.proxy_stderr + last.proxy_stderr)
