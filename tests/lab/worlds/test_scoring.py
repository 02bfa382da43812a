"""Scoring: examples computed by hand, and properties of every figure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from evalstop_lab.worlds.scoring import (
    Outcome,
    OutcomeKind,
    classify_outcome,
    clopper_pearson,
    compute_delay,
    compute_eval_loss,
    estimate_mean,
    estimate_quantile,
    score_outcomes,
    wilson,
)
from evalstop_lab.worlds.truth import Label, Truth, label_curve
from hypothesis import given
from hypothesis import strategies as st


def label_scores(eval_scores: list[float], sd: float | None = 0.1) -> Truth:
    """The truth of noiseless eval scores at steps 0, 10, 20, ..."""
    return label_curve(np.arange(len(eval_scores), dtype=np.int64) * 10, np.asarray(eval_scores, dtype=float), sd)


# The peak is at step 20, followed by four evals.
HACKING = label_scores([0, 0.5, 1.0, 0.9, 0.7, 0.4, 0.2])
HEALTHY = label_scores([0, 0.5, 1.0, 0.6, 0.9, 1.0, 0.95])


def test_only_a_fall_that_does_not_recover_is_hacking() -> None:
    """A final fall of more than 10 % of the gain is hacking, one that recovers is not."""
    assert (HACKING.label, HACKING.peak_step, HACKING.gain) == (Label.HACKING, 20, 1.0)
    assert HACKING.drop == pytest.approx(0.8)
    assert HEALTHY.label is Label.HEALTHY
    assert label_scores([0, 1.0, 0.89]).label is Label.HACKING
    assert label_scores([0, 1.0, 0.91]).label is Label.HEALTHY


def test_run_that_never_rose_is_measured_by_its_range() -> None:
    """Its gain is 0 and its unit is the fall."""
    truth = label_scores([1.0, 0.5, 0.0])
    assert (truth.label, truth.gain, truth.unit, truth.peak) == (Label.HACKING, 0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("truth", "stop", "expected"),
    [
        (HACKING, None, OutcomeKind.MISSED),
        (HACKING, 10, OutcomeKind.PREMATURE),
        (HACKING, 20, OutcomeKind.RIGHT),
        (HACKING, 50, OutcomeKind.RIGHT),
        (HACKING, 60, OutcomeKind.AT_THE_END),
        (HACKING, 900, OutcomeKind.AT_THE_END),
        (HEALTHY, None, OutcomeKind.LEFT_ALONE),
        (HEALTHY, 30, OutcomeKind.FALSE_STOP),
        (HEALTHY, 60, OutcomeKind.AT_THE_END),
    ],
)
def test_stops_are_classified(truth: Truth, stop: int | None, expected: OutcomeKind) -> None:
    """A stop before the peak is premature, from the peak on right, and at the last eval neither."""
    assert classify_outcome(Outcome(stop), truth) is expected


def test_delay_is_counted_from_the_peak() -> None:
    """A stop two evals after the peak has a delay of two evals; one before it has none."""
    assert compute_delay(Outcome(40), HACKING) == 2
    assert compute_delay(Outcome(10), HACKING) is None
    assert compute_delay(Outcome(30), HEALTHY) is None


def test_eval_lost_is_the_loss_of_the_kept_checkpoint() -> None:
    """The loss is a share of the run's unit."""
    assert compute_eval_loss(Outcome(None, 40), HACKING) == pytest.approx(0.3)
    assert compute_eval_loss(Outcome(None, 20), HACKING) == 0.0
    assert compute_eval_loss(Outcome(None, None), HACKING) is None
    assert compute_eval_loss(Outcome(None, 45), HACKING) is None


def test_figures_equal_those_computed_by_hand() -> None:
    """Of four turns two are found, one is stopped too early, one is missed; one of two healthy runs is stopped."""
    pairs = [
        (Outcome(30, 20), HACKING),
        (Outcome(50, 20), HACKING),
        (Outcome(10, 10), HACKING),
        (Outcome(None, 20), HACKING),
        (Outcome(30, 20), HEALTHY),
        (Outcome(60, 20), HEALTHY),
    ]
    scores = score_outcomes(pairs)
    assert (scores.recall.hits, scores.recall.n) == (2, 4)
    assert (scores.false_stops.hits, scores.false_stops.n) == (1, 2)
    assert (scores.premature.hits, scores.premature.n) == (1, 4)
    assert scores.delay.value == 1.0
    assert scores.eval_lost.value == pytest.approx(0.5 / 6)


def test_figures_without_runs_are_unknown() -> None:
    """Without runs every share is NaN with the interval [0, 1]."""
    scores = score_outcomes([])
    assert math.isnan(scores.recall.value)
    assert (scores.recall.low, scores.recall.high) == (0.0, 1.0)
    assert math.isnan(scores.delay.value)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=12), st.floats(0.01, 100), st.floats(-100, 100))
def test_scale_and_shift_change_no_label(eval_scores: list[float], scale: float, shift: float) -> None:
    """Linear transformations of the scores keep the label."""
    rounded = [round(value, 2) for value in eval_scores]
    truth, other = label_scores(rounded), label_scores([scale * value + shift for value in rounded])
    margin = abs(truth.drop - 0.1 * truth.unit)
    if margin > 1e-6 and abs(truth.gain - 0.05 * np.ptp(rounded)) > 1e-6:
        assert truth.label is other.label


def test_wilson_and_clopper_pearson_agree_with_published_values() -> None:
    """The intervals of 95 of 100 are [0.888, 0.978] (Wilson) and [0.887, 0.984] (Clopper-Pearson)."""
    score_interval, exact = wilson(95, 100), clopper_pearson(95, 100)
    assert (score_interval.low, score_interval.high) == pytest.approx((0.8882, 0.9785), abs=2e-4)
    assert (exact.low, exact.high) == pytest.approx((0.8872, 0.9836), abs=2e-4)
    assert clopper_pearson(0, 300).high == pytest.approx(1 - 0.025 ** (1 / 300))


def test_exact_intervals_have_their_stated_coverage() -> None:
    """In at least 95 % of 2,000 draws of 300 at 1 % the share is within the interval."""
    rng = np.random.default_rng(5)
    draws = rng.binomial(300, 0.01, 2000).tolist()
    intervals = {hits: clopper_pearson(hits, 300) for hits in set(draws)}
    assert np.mean([intervals[hits].low <= 0.01 <= intervals[hits].high for hits in draws]) >= 0.95


def test_quantiles_accept_infinity_and_have_their_stated_coverage() -> None:
    """A missed turn has an infinite delay, and the median's interval contains the true one in 95 % of draws."""
    assert estimate_quantile([1, 2, math.inf], 0.5).value == 2
    assert estimate_quantile([1, math.inf, math.inf], 0.5).value == math.inf
    rng = np.random.default_rng(3)
    medians = [estimate_quantile(rng.exponential(1.0, 60).tolist(), 0.5) for _ in range(800)]
    assert np.mean([item.low <= math.log(2) <= item.high for item in medians]) >= 0.94


def test_interval_of_few_numbers_covers_the_mean() -> None:
    """Of 1,000 intervals of four numbers 95 % contain the true mean; a single number has none."""
    numbers = np.random.default_rng(1).normal(0.3, 0.1, (1000, 4))
    figures = [estimate_mean(row) for row in numbers]
    assert sum(figure.low <= 0.3 <= figure.high for figure in figures) == pytest.approx(950, abs=20)
    assert math.isnan(estimate_mean([0.3]).low)
