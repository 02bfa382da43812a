"""The presets do what their names say, on every seed tried and not only on the one that is shown."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from evalstop_lab.errors import CannotHasten
from evalstop_lab.rlhf import PRESETS, Eval, Trainer, hastened

SEEDS = (0, 1, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in (2, 3, 4, 5)))
WINDOW = 5


def train(preset: str, seed: int) -> list[Eval]:
    return list(Trainer(hastened(replace(PRESETS[preset], seed=seed), 20)).evals())


def windows(values: list[float]) -> list[float]:
    return [fmean(values[start : start + WINDOW]) for start in range(len(values) - WINDOW + 1)]


def stderr_of_difference(log: list[Eval], start: int) -> float:
    """The standard error of the last window's mean of gold less that of the window at `start`."""
    errors = [logged.gold_stderr for logged in log[start : start + WINDOW] + log[-WINDOW:]]
    return math.hypot(*errors) / WINDOW


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gold_of_overoptimizes_peaks_and_falls_while_the_proxy_climbs(seed: int) -> None:
    """Gold gains, then loses at least 30 % of its gain and three standard errors, and the proxy never stops rising."""
    log = train("overoptimizes", seed)
    gold, proxy = windows([logged.gold for logged in log]), windows([logged.proxy for logged in log])
    peak = max(range(len(gold)), key=gold.__getitem__)
    gain, drop = gold[peak] - log[0].gold, gold[peak] - gold[-1]
    assert gain > 10 * stderr_of_difference(log, peak)
    assert drop > 3 * stderr_of_difference(log, peak)
    assert drop > 0.3 * gain
    assert proxy[-1] > proxy[peak] + 0.5
    assert 5 <= peak <= len(gold) * 2 // 3


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gold_of_healthy_rises_and_stays(seed: int) -> None:
    """Gold gains at least one deviation of ordinary texts, and the last window is within noise of the best one."""
    log = train("healthy", seed)
    gold = windows([logged.gold for logged in log])
    peak = max(range(len(gold)), key=gold.__getitem__)
    # The best of some fifty windows stands two to three standard errors above its truth by selection alone.
    assert gold[peak] - gold[-1] <= 5 * stderr_of_difference(log, peak)
    assert gold[-1] - log[0].gold > 1.0


def test_the_presets_differ_in_nothing_that_would_hide_a_turn() -> None:
    """Healthy gets the same steps, learning rate and evals: only the KL price and the comparisons differ."""
    over, healthy = PRESETS["overoptimizes"], PRESETS["healthy"]
    assert healthy == replace(
        over,
        kl_coefficient=healthy.kl_coefficient,
        comparisons=healthy.comparisons,
        label_noise=healthy.label_noise,
    )


def test_a_hastened_run_has_as_many_evals() -> None:
    """Hastening keeps the number of evals and the distance the learning rate can carry the policy."""
    config, hasty = PRESETS["healthy"], hastened(PRESETS["healthy"], 20)
    assert hasty.steps // hasty.eval_every == config.steps // config.eval_every
    assert hasty.steps * hasty.learning_rate == pytest.approx(config.steps * config.learning_rate)


def test_a_run_cannot_be_hastened_past_its_evals() -> None:
    """A factor that does not divide the steps between evals is refused with the number it has to divide."""
    with pytest.raises(CannotHasten, match="400"):
        hastened(PRESETS["healthy"], 3)
