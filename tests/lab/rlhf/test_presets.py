"""The presets over-optimize or stay healthy on several seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.rlhf.trainer import PRESETS, Eval, Trainer, hasten_run

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("seed", SEEDS)
def test_gold_of_healthy_rises_and_stays(seed: int) -> None:
    """Gold gains at least one standard deviation, and the last window is within noise of the best one."""
    log = train("healthy", seed)
    gold = compute_window_means([logged.gold for logged in log])
    peak = max(range(len(gold)), key=gold.__getitem__)
    # By selection alone, the best of about fifty windows is two to three standard errors above its true mean.
    assert gold[peak] - gold[-1] <= 5 * compute_difference_stderr(log, peak)
    assert gold[-1] - log[0].gold > 1.0


def test_factor_must_divide_the_steps_between_evals() -> None:
    """Another factor is refused, and the message has the number of steps."""
    with pytest.raises(UnusableArguments, match="400"):
        hasten_run(PRESETS["healthy"], 3)
