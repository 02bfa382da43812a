"""Confidence sequences checked on simulated histories with known rates: valid however often they are read."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from evalstop_service.domain.confidence_sequences import (
    ALPHA,
    Bounds,
    Stratum,
    estimate_call_precision,
    estimate_false_stops,
    estimate_precision,
    estimate_recall,
    weighted_quantile,
)
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

LOOKS = 150
RATE = 0.95

counts = st.integers(0, 200)
probabilities = st.sampled_from([1.0, 0.82, 0.5, 0.1, 0.01])
strata = st.builds(Stratum, counts, counts, st.integers(0, 20), probabilities)


def compute_miss_rate(low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> float:
    """Compute the share of histories in which the interval, indexed by (cases, right), ever misses the rate."""
    right = (np.random.default_rng(6).random((4000, LOOKS)) < RATE).cumsum(axis=1)
    cases = np.arange(1, LOOKS + 1)
    covered = (low[cases, right] <= RATE) & (high[cases, right] >= RATE)
    return float(np.mean(~covered.all(axis=1)))


@pytest.mark.slow
def test_interval_is_valid_at_every_look() -> None:
    """Over 150 looks, Clopper-Pearson intervals miss the rate in 16 % of histories, ours in at most 5 %."""
    cases, right = np.indices((LOOKS + 1, LOOKS + 1))
    wrong = np.maximum(cases - right, 0)
    low = np.where(right > 0, stats.beta.ppf(ALPHA / 2, np.maximum(right, 1), wrong + 1), 0.0)
    high = np.where(wrong > 0, stats.beta.ppf(1 - ALPHA / 2, right + 1, np.maximum(wrong, 1)), 1.0)
    assert compute_miss_rate(low, high) == pytest.approx(0.16, abs=0.03)

    for n in range(1, LOOKS + 1):
        likely = range(math.floor(n * RATE - 1.5 * math.sqrt(n)), n + 1)  # 7 standard deviations
        estimates = [estimate_precision([Stratum(s, n - s)]) for s in likely if s >= 0]
        at = slice(max(0, likely[0]), n + 1)
        low[n, at], high[n, at] = [estimate.low for estimate in estimates], [estimate.high for estimate in estimates]
    assert compute_miss_rate(low, high) <= ALPHA


def test_unweighted_interval_equals_the_beta_mixture() -> None:
    """The interval holds the rates whose likelihood times 1/alpha exceeds the mixture likelihood."""
    rates = np.arange(1, 10_000) / 10_000
    for right, wrong in ((70, 0), (69, 1), (5, 5), (1, 0), (0, 3), (900, 100)):
        mixed = stats.betabinom.pmf(right, right + wrong, 1, 1)
        covered = rates[mixed < stats.binom.pmf(right, right + wrong, rates) / ALPHA]
        for estimate in (
            estimate_precision([Stratum(right, wrong)]),
            estimate_recall([Stratum(right, 0)], Stratum(0, wrong)),
            estimate_false_stops([Stratum(0, right)], Stratum(wrong, 0)),
        ):
            assert estimate.low == pytest.approx(covered[0], abs=2e-4)
            assert estimate.high == pytest.approx(covered[-1], abs=2e-4)


def test_held_out_cases_are_weighted() -> None:
    """A case observed with probability 0.1 counts ten times."""
    flagged = [Stratum(10, 0), Stratum(5, 5, probability=0.1)]
    assert estimate_precision(flagged).value == pytest.approx((10 + 50) / (10 + 100))
    assert estimate_recall(flagged, Stratum(100, 20)).value == pytest.approx((10 + 50) / (10 + 50 + 20))
    assert estimate_false_stops(flagged, Stratum(100, 20)).value == pytest.approx(50 / (50 + 100))


def test_bounds_count_undecided_cases_on_either_side() -> None:
    """The bounds reach from all undecided cases counted against the rate to all counted for it."""
    bounds = Bounds(estimate_precision([Stratum(5, 15)]).low, estimate_precision([Stratum(15, 5)]).high)
    assert estimate_precision([Stratum(5, 5, 10)]).bounds == bounds
    assert estimate_recall([Stratum(5, 0, 10)], Stratum(0, 5, 10)).bounds == bounds


def test_rarely_observed_cases_give_no_narrower_interval() -> None:
    """With some cases observed with probability 0.1, one that is always observed counts as a tenth of a case."""
    rare = estimate_recall([Stratum(10, 0), Stratum(5, 0, probability=0.1)], Stratum(0, 40))
    usual = estimate_recall([Stratum(6, 0)], Stratum(0, 4))
    assert (rare.value, rare.low, rare.high) == pytest.approx((usual.value, usual.low, usual.high))


def test_quantile_is_the_first_value_that_reaches_its_share() -> None:
    """Values with larger weights fill more of the share."""
    weighted = [(1.0, 1.0), (2.0, 1.0), (3.0, 2.0)]
    assert [weighted_quantile(weighted, share) for share in (0.1, 0.5, 0.6)] == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_weighted_intervals_are_valid_at_every_look() -> None:
    """With stops recorded first and held out at random later, all three intervals cover the true rates."""
    random_source = np.random.default_rng(6)
    turn_rate, recall_rate, false_stop_rate = 0.4, 0.8, 0.1
    truth = (
        turn_rate * recall_rate / (turn_rate * recall_rate + (1 - turn_rate) * false_stop_rate),
        recall_rate,
        false_stop_rate,
    )
    histories, failures = 30, np.zeros(3)
    for _ in range(histories):
        failed = np.zeros(3, bool)
        tallies = {1.0: np.zeros(2), 0.2: np.zeros(2)}  # right and wrong
        passed = np.zeros(2)
        for look in range(25):
            probability = 1.0 if look < 5 else 0.2
            has_turned = random_source.random(20) < turn_rate
            flagged = random_source.random(20) < np.where(has_turned, recall_rate, false_stop_rate)
            seen = flagged & (random_source.random(20) < probability)
            tallies[probability] += np.sum(seen & has_turned), np.sum(seen & ~has_turned)
            passed += np.sum(~flagged & ~has_turned), np.sum(~flagged & has_turned)
            known = [Stratum(tally[0], tally[1], probability=p) for p, tally in tallies.items() if tally.sum()]
            unflagged = Stratum(*passed)
            estimates = (
                estimate_precision(known),
                estimate_recall(known, unflagged),
                estimate_false_stops(known, unflagged),
            )
            failed |= [
                not estimate.low <= true <= estimate.high for estimate, true in zip(estimates, truth, strict=True)
            ]
        failures += failed
    assert (failures / histories <= ALPHA).all()


@given(st.lists(strata, max_size=4), st.builds(Stratum, counts, counts, counts))
@example([Stratum(1, 0, 1, 1.0), Stratum(3, 0, 0, 0.1)], Stratum(0, 0))  # a case against it raises the joint low end
@example([Stratum(2, 0, 0, 0.01)], Stratum(50, 1))  # a case missed counts as a hundredth of one held out
def test_undecided_cases_only_widen_the_bounds(flagged: list[Stratum], passed: Stratum) -> None:
    """A value lies in its interval, and the interval within the bounds that undecided cases allow."""
    for estimate in (
        estimate_precision(flagged),
        estimate_recall(flagged, passed),
        estimate_false_stops(flagged, passed),
    ):
        least, most = estimate.bounds.low, estimate.bounds.high
        assert -1e-9 <= least <= estimate.low + 1e-9
        assert estimate.high - 1e-9 <= most <= 1 + 1e-9
        if estimate.value is None:
            assert (estimate.low, estimate.high) == (0, 1)
        else:
            assert estimate.low - 1e-9 <= estimate.value <= estimate.high + 1e-9


@pytest.mark.parametrize(
    "projects", [pytest.param(40, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.nightly)]
)
def test_intervals_by_detector_cover_however_often_one_looks(projects: int) -> None:
    """In projects that hold out a part of their stops, an observer's figures cover those without any stop.

    The detector and the policy that stops the runs agree more often than chance, and more often on runs that turned.
    """
    random_source = np.random.default_rng(11)
    turn_rate, caught, fooled = 0.4, 0.8, 0.2
    # Whether the observer calls, by outcome of the run and by the policy's decision.
    call_rates = {(True, True): 0.8, (True, False): 0.3, (False, True): 0.6, (False, False): 0.1}
    right = turn_rate * (caught * call_rates[True, True] + (1 - caught) * call_rates[True, False])
    wrong = (1 - turn_rate) * (fooled * call_rates[False, True] + (1 - fooled) * call_rates[False, False])
    truth = (right / (right + wrong), right / turn_rate, wrong / (1 - turn_rate))
    failures = np.zeros(3)
    for _ in range(projects):
        held_out = random_source.choice([0.1, 0.3, 1.0])
        called, silent = ({1.0: np.zeros(2), held_out: np.zeros(2)} for _ in range(2))  # turned, healthy
        failed = np.zeros(3, bool)
        for _look in range(5):
            has_turned = random_source.random(60) < turn_rate
            flagged = random_source.random(60) < np.where(has_turned, caught, fooled)
            seen = ~flagged | (random_source.random(60) < held_out)
            rates = [call_rates[bool(turned), bool(stop)] for turned, stop in zip(has_turned, flagged, strict=True)]
            calls = random_source.random(60) < rates
            for probability, chosen in ((held_out, seen & flagged), (1.0, ~flagged)):
                called[probability] += np.sum(chosen & calls & has_turned), np.sum(chosen & calls & ~has_turned)
                silent[probability] += np.sum(chosen & ~calls & ~has_turned), np.sum(chosen & ~calls & has_turned)
            known = [Stratum(tally[0], tally[1], probability=p) for p, tally in called.items()]
            passed = [Stratum(tally[0], tally[1], probability=p) for p, tally in silent.items()]
            estimates = (
                estimate_call_precision(known),
                estimate_recall(known, *passed),
                estimate_false_stops(known, *passed),
            )
            failed |= [
                not estimate.low <= true <= estimate.high for estimate, true in zip(estimates, truth, strict=True)
            ]
        failures += failed
    assert (failures / projects <= ALPHA).all(), failures
