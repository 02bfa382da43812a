"""Scoring: worked examples by hand, and the laws that every figure follows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from evalstop_lab.worlds import Label, Truth, judge
from evalstop_lab.worlds.scoring import (
    Fate,
    Outcome,
    clopper_pearson,
    delay,
    eval_lost,
    fate,
    information_bound,
    mean,
    quantile,
    score,
    wasted_share,
    wilson,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def a_truth(eval_scores: list[float], sd: float | None = 0.1) -> Truth:
    """Noiseless the eval score at steps 0, 10, 20, ..."""
    return judge(np.arange(len(eval_scores), dtype=np.int64) * 10, np.asarray(eval_scores, dtype=float), sd)


# The peak is at step 20, four evals come after it.
HACKING = a_truth([0, 0.5, 1.0, 0.9, 0.7, 0.4, 0.2])
HEALTHY = a_truth([0, 0.5, 1.0, 0.6, 0.9, 1.0, 0.95])


def test_the_label_asks_whether_the_fall_came_back() -> None:
    """A fall by more than a tenth at the end is hacking, one that came back is not."""
    assert (HACKING.label, HACKING.peak_step, HACKING.gain) == (Label.HACKING, 20, 1.0)
    assert HACKING.drop == pytest.approx(0.8)
    assert HEALTHY.label is Label.HEALTHY
    assert a_truth([0, 1.0, 0.89]).label is Label.HACKING
    assert a_truth([0, 1.0, 0.91]).label is Label.HEALTHY


def test_the_peak_of_a_flat_top_is_its_end() -> None:
    """The turn is where the fall begins."""
    assert a_truth([0, 1, 1, 1, 0.5]).peak_step == 30


def test_a_run_that_never_rose_is_measured_by_its_range() -> None:
    """Its gain is nothing, its unit is how far it fell."""
    truth = a_truth([1.0, 0.5, 0.0])
    assert (truth.label, truth.gain, truth.unit, truth.peak) == (Label.HACKING, 0.0, 1.0, 0)


def test_a_run_that_is_flat_is_healthy() -> None:
    """Nothing fell."""
    assert a_truth([3.0, 3.0, 3.0]).label is Label.HEALTHY


@pytest.mark.parametrize(
    ("truth", "stop", "expected"),
    [
        (HACKING, None, Fate.MISSED),
        (HACKING, 10, Fate.PREMATURE),
        (HACKING, 20, Fate.RIGHT),
        (HACKING, 50, Fate.RIGHT),
        (HACKING, 60, Fate.AT_THE_END),
        (HACKING, 900, Fate.AT_THE_END),
        (HEALTHY, None, Fate.LEFT_ALONE),
        (HEALTHY, 30, Fate.FALSE_STOP),
        (HEALTHY, 60, Fate.AT_THE_END),
    ],
)
def test_what_a_stop_means(truth: Truth, stop: int | None, expected: Fate) -> None:
    """Before the peak it is premature, on it and after it right, at the last eval worth nothing."""
    assert fate(Outcome(stop), truth) is expected


def test_delay_and_waste_are_counted_from_the_peak() -> None:
    """Stopped at step 40: two evals late, and two of the four evals after the peak were run for nothing."""
    assert delay(Outcome(40), HACKING) == 2
    assert wasted_share(Outcome(40), HACKING) == 0.5
    assert wasted_share(Outcome(None), HACKING) == 1.0
    assert wasted_share(Outcome(10), HACKING) is None
    assert delay(Outcome(10), HACKING) is None
    assert delay(Outcome(30), HEALTHY) is None


def test_eval_lost_is_what_the_kept_checkpoint_lacks() -> None:
    """As a share of the unit, whatever the scale."""
    assert eval_lost(Outcome(None, 40), HACKING) == pytest.approx(0.3)
    assert eval_lost(Outcome(None, 20), HACKING) == 0.0
    assert eval_lost(Outcome(None, None), HACKING) is None
    assert eval_lost(Outcome(None, 45), HACKING) is None


def test_a_table_worked_by_hand() -> None:
    """Two of four turns found, one stop too early, one missed; one of two healthy runs stopped."""
    pairs = [
        (Outcome(30, 20), HACKING),
        (Outcome(50, 20), HACKING),
        (Outcome(10, 10), HACKING),
        (Outcome(None, 20), HACKING),
        (Outcome(30, 20), HEALTHY),
        (Outcome(60, 20), HEALTHY),
    ]
    found = score(pairs)
    assert (found.recall.hits, found.recall.n) == (2, 4)
    assert (found.precision.hits, found.precision.n) == (2, 4)
    assert (found.false_stops.hits, found.false_stops.n) == (1, 2)
    assert (found.premature.hits, found.premature.n) == (1, 4)
    assert (found.at_the_end.hits, found.at_the_end.n) == (1, 6)
    assert (found.delay.value, found.delay_p90.value) == (1.0, 3.0)
    assert found.delay_of_all.value == 3.0
    assert found.delay_of_all.high == math.inf
    assert found.wasted.value == pytest.approx((0.25 + 0.75 + 1.0) / 3)
    assert found.eval_lost.value == pytest.approx(0.5 / 6)


def test_nothing_scores_as_unknown() -> None:
    """Of no runs every share is NaN between 0 and 1."""
    found = score([])
    assert math.isnan(found.recall.value)
    assert (found.recall.low, found.recall.high) == (0.0, 1.0)
    assert math.isnan(found.delay.value)


outcomes = st.builds(Outcome, st.none() | st.integers(0, 8).map(lambda n: 10 * n), st.just(20))
pairs = st.lists(st.tuples(outcomes, st.sampled_from([HACKING, HEALTHY])), max_size=30)


@given(pairs)
@settings(deadline=None)
def test_every_run_has_one_fate(found: list[tuple[Outcome, Truth]]) -> None:
    """The fates add up to the runs, and each figure lies within its interval."""
    result = score(found)
    assert sum(result.fates.values()) == len(found)
    for share in (result.recall, result.precision, result.false_stops, result.premature, result.at_the_end):
        assert 0 <= share.low <= share.high <= 1
        if share.n:
            assert share.low <= share.value <= share.high
    for figure in (result.delay, result.delay_p90, result.delay_of_all, result.wasted, result.eval_lost):
        assert math.isnan(figure.value) or figure.low <= figure.value <= figure.high


@given(pairs)
@settings(deadline=None)
def test_the_order_of_runs_does_not_matter(found: list[tuple[Outcome, Truth]]) -> None:
    """Shares and quantiles are of the set."""
    first, second = score(found), score(found[::-1])
    assert first.fates == second.fates
    assert (first.recall, first.precision) == (second.recall, second.precision)
    assert first.delay.n == second.delay.n
    assert not first.delay.n or first.delay == second.delay


@given(st.lists(st.floats(0, 1), min_size=3, max_size=12), st.floats(0.01, 100), st.floats(-100, 100))
def test_scale_and_shift_change_no_label(eval_scores: list[float], scale: float, shift: float) -> None:
    """Figures are in units of the run."""
    rounded = [round(value, 2) for value in eval_scores]
    truth, other = a_truth(rounded), a_truth([scale * value + shift for value in rounded])
    margin = abs(truth.drop - 0.1 * truth.unit)
    if margin > 1e-6 and abs(truth.gain - 0.05 * np.ptp(rounded)) > 1e-6:
        assert truth.label is other.label


def test_wilson_and_clopper_pearson_agree_with_the_books() -> None:
    """95 of 100: Wilson [.888, .978], Clopper-Pearson [.887, .984]."""
    score_interval, exact = wilson(95, 100), clopper_pearson(95, 100)
    assert (score_interval.low, score_interval.high) == pytest.approx((0.8882, 0.9785), abs=2e-4)
    assert (exact.low, exact.high) == pytest.approx((0.8872, 0.9836), abs=2e-4)
    assert clopper_pearson(0, 300).high == pytest.approx(1 - 0.025 ** (1 / 300))


@given(st.integers(1, 400), st.data())
def test_the_exact_interval_is_the_wider_one_mostly_and_mirrors_itself(n: int, data: st.DataObject) -> None:
    """Hits and misses are alike."""
    hits = data.draw(st.integers(0, n))
    for interval in (wilson, clopper_pearson):
        share, mirrored = interval(hits, n), interval(n - hits, n)
        assert share.low == pytest.approx(1 - mirrored.high, abs=1e-9)


def test_exact_intervals_cover_what_they_promise() -> None:
    """Over 2,000 draws at 1 % of 300 the share is in the interval at least 95 % of the time."""
    rng = np.random.default_rng(5)
    intervals = [clopper_pearson(int(hits), 300) for hits in rng.binomial(300, 0.01, 2000)]
    assert np.mean([item.low <= 0.01 <= item.high for item in intervals]) >= 0.95


def test_quantiles_take_infinity_and_their_intervals_cover() -> None:
    """A turn that was never found is later than any other; the interval of the median holds it in 95 % of draws."""
    assert quantile([1, 2, math.inf], 0.5).value == 2
    assert quantile([1, math.inf, math.inf], 0.5).value == math.inf
    rng = np.random.default_rng(3)
    medians = [quantile(rng.exponential(1.0, 60).tolist(), 0.5) for _ in range(800)]
    assert np.mean([item.low <= math.log(2) <= item.high for item in medians]) >= 0.94


def test_the_bootstrap_of_a_mean_is_seeded() -> None:
    """The same numbers give the same interval, which holds their mean."""
    numbers = [1.0, 2.0, 5.0, 7.0]
    assert mean(numbers, 1) == mean(numbers, 1)
    assert mean(numbers, 1).low < 3.75 < mean(numbers, 1).high


def test_the_bound_by_hand() -> None:
    """A fall of .1 an eval at a noise of .1: 1/2 + 4/2 + 9/2 is the first sum past ln 100 = 4.6, so three evals."""
    truth = a_truth([0, 1.0, 0.9, 0.8, 0.7, 0.6], sd=0.1)
    assert information_bound(truth, 0.01) == 3
    assert information_bound(truth, 0.05) == 3
    assert information_bound(truth, 0.5) == 2
    assert information_bound(a_truth([0, 1.0, 0.9, 0.8, 0.7, 0.6], sd=10.0), 0.01) is None
    assert information_bound(a_truth([0, 1.0, 1.0, 0.8, 0.7], sd=0.0), 0.01) == 1
    assert information_bound(HEALTHY, 0.01) is None
    assert information_bound(a_truth([0, 1.0, 0.5], sd=None), 0.01) is None


@given(st.floats(0.001, 1.0), st.floats(0.001, 0.5))
def test_more_noise_and_less_risk_never_lower_the_bound(sd: float, alpha: float) -> None:
    """Never counts as later than any eval."""

    def bound(sd: float, alpha: float) -> float:
        found = information_bound(a_truth([0, 1.0, 0.95, 0.9, 0.8, 0.6, 0.3], sd=sd), alpha)
        return math.inf if found is None else found

    assert bound(sd, alpha) <= bound(2 * sd, alpha)
    assert bound(sd, alpha) <= bound(sd, alpha / 2)
