"""The toy task that the demo trains on: its policy, its rewards, and its trainer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.rlhf.policy import Floats, Policy, Task, Texts, draw_policy
from evalstop_lab.rlhf.trainer import (
    PRESETS,
    Config,
    Eval,
    Trainer,
    average_over_prompts,
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


TASK = Task(prompts=2, length=3, vocabulary=3)


def build_policy(seed: int, scale: float = 1.0, task: Task = TASK) -> Policy:
    return draw_policy(task, scale, np.random.default_rng(seed))


def group_by_prompt(values: Floats) -> Floats:
    return values.reshape(TASK.prompts, -1)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_kl_equals_its_sum_over_all_texts(scale: float) -> None:
    """The forward sweep gives the same KL as enumeration."""
    policy, initial, texts = build_policy(3, scale), build_policy(4, scale), list_every_text(TASK)
    log_p, log_q = group_by_prompt(policy.log_likelihood(texts)), group_by_prompt(initial.log_likelihood(texts))
    assert policy.kl(initial) == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


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
