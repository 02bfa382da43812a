"""Anytime-valid evidence: false alarms as rare as promised, true falls found, and the parts worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from evalstop_detectors import MetricRole, Observation
from evalstop_detectors.detectors.e_process import EProcess, _binned, _rank, _upper_end
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from tests.detectors.strategies import eval_series

Floats = NDArray[np.float64]


def gaussian(rng: np.random.Generator, size: int) -> Floats:
    return rng.standard_normal(size)


def student_t3(rng: np.random.Generator, size: int) -> Floats:
    return np.asarray(rng.standard_t(3, size) / math.sqrt(3))


def weakly_autocorrelated(rng: np.random.Generator, size: int) -> Floats:
    shocks, values = rng.standard_normal(size), np.zeros(size)
    for index in range(1, size):
        values[index] = 0.3 * values[index - 1] + math.sqrt(1 - 0.09) * shocks[index]
    return values


def alarmed_at(scores: Floats, stderr: float | None, detector: EProcess | None = None) -> int | None:
    detector = detector or EProcess()
    state, stop_at = detector.start(), detector.thresholds.stop_at
    for index, score in enumerate(scores):
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, score, stderr))
        if evidence.reaches(stop_at):
            return index
    return None


@pytest.mark.parametrize("told", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_it_equals_its_definition(seed: int, told: float) -> None:
    """The evidence after every eval is that of all bets ever placed, from the whole history, and so is the turn."""
    rng = np.random.default_rng(seed)
    clean = np.interp(np.arange(140), [0, 60, 139], [0, 3, 3 - seed])
    detector = EProcess(alpha=float(rng.choice([0.01, 0.5])), tolerance=float(rng.choice([0.0, 0.2])))
    state, history = detector.start(), list[Observation]()
    for index, score in enumerate(clean + 0.3 * rng.standard_t(3, 140)):
        stderr = float(rng.uniform(0.2, 0.4)) if rng.random() < told else None
        history.append(Observation(MetricRole.EVAL, index, float(score), stderr))
        state, evidence = detector.step(state, history[-1])
        if index % 9 == 0 or index > 130:
            value, turn = slowly(detector, history)
            assert evidence.value == pytest.approx(value, rel=1e-9, abs=1e-9)
            assert evidence.turn_step == turn


def slowly(detector: EProcess, history: list[Observation]) -> tuple[float, int | None]:
    y = [item.value - history[0].value for item in history]
    reference, turn, value, turn_of_value = -math.inf, None, 0.0, None
    bets, counted, variances, differences = list[tuple[float, float]](), list[float](), list[float](), list[float]()
    for index, item in enumerate(history):
        n = index + 1
        sd = item.stderr or upper_scale(differences, detector.alpha)
        if sd is not None and reference > -math.inf:
            bets.append((1 / (2.10975 * (len(bets) + 2) * math.log(len(bets) + 2) ** 2), 0.0))
            z = min((reference - detector.tolerance - y[index]) / sd, 4.0)
            bets = [(share, gained + z) for share, gained in bets]
            money = 1 - sum(share for share, _ in bets)
            for b in (0.125, 0.25, 0.5, 1.0):
                since = range(len(bets), 0, -1)
                money += sum(s * math.exp(b * g - k * b * b / 2) for (s, g), k in zip(bets, since, strict=True)) / 4
            value = max(math.log(money), 0.0)
            turn_of_value = turn if value > 0 else None
        counted.append(y[index] if sd is None else min(y[index], (y[index - 1] if index else 0.0) + 4 * sd))
        variances.append(math.inf if sd is None else sd * sd)
        found = [bound(detector.alpha, counted[-1:], variances[-1:], 0, n)]
        for power in range(10):
            if n % 2**power == 0 and n >= 2 ** (power + 1):
                size = 2 ** (power + 1)
                found.append(bound(detector.alpha, counted[-size:], variances[-size:], power + 1, n // 2**power))
        if max(found) > reference:
            reference, turn = max(found), item.step
        if index % 2:
            differences.append(abs(y[index] - y[index - 1]))
    return value, turn_of_value


def bound(alpha: float, values: list[float], variances: list[float], power: int, index: int) -> float:
    share = alpha / 4 / ((power + 1) * (power + 2)) / (index * (index + 1))
    mean, variance = sum(values) / len(values), sum(variances) / len(variances)
    return mean - math.sqrt(2 * math.log(1 / share) * variance / len(values))


def upper_scale(differences: list[float], alpha: float) -> float | None:
    """By the smallest rank that is seldom below the median, its value rounded up to an eighth octave."""
    n = len(differences)
    if n == 0 or n * math.log(2) < math.log(n * (n + 1) * 4 / alpha):
        return None
    for rank in range(n // 2 + 1, n):
        q = rank / n
        if n * (math.log(2) + q * math.log(q) + (1 - q) * math.log(1 - q)) >= math.log(n * (n + 1) * 4 / alpha):
            break
    else:
        rank = n
    mantissa, exponent = math.frexp(sorted(differences)[rank - 1])
    return math.ldexp(0.5 + (math.floor(16 * (mantissa - 0.5)) + 1) / 16, exponent) / 0.9538


@pytest.mark.parametrize(("size", "runs"), [(20, 300), (100, 150), (500, 40), (2500, 4)])
@pytest.mark.parametrize("stderr", [None, 1.0])
@pytest.mark.parametrize("noise", [gaussian, student_t3, weakly_autocorrelated])
def test_false_alarms_are_as_rare_as_promised(
    size: int, runs: int, stderr: float | None, noise: Callable[[np.random.Generator, int], Floats]
) -> None:
    """Of flat runs so few are stopped that a chance of alpha explains it, at every length.

    t3 and AR(1) are outside the assumptions; at this length and number of runs they are still not told apart from them.
    """
    alpha, rng = 0.05, np.random.default_rng(size)
    stopped = sum(alarmed_at(noise(rng, size), stderr, EProcess(alpha=alpha)) is not None for _ in range(runs))
    assert stats.binom.sf(stopped - 1, runs, alpha) > 1e-3


def test_rising_runs_raise_no_alarm() -> None:
    """A run that goes up, at once or slowly, is not below its best."""
    rng = np.random.default_rng(0)
    for index in range(60):
        clean = np.linspace(0, 5, 200) if index % 2 else np.where(np.arange(200) < 100, 0.0, 30.0)
        assert alarmed_at(clean + rng.standard_normal(200), 1.0) is None


@pytest.mark.parametrize("stderr", [None, 0.1])
def test_a_fall_is_found(stderr: float | None) -> None:
    """A fall of ten standard deviations is found within a dozen evals, and the turn is placed before it."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = np.where(np.arange(120) < 80, 1.0, 0.0) + 0.1 * rng.standard_normal(120)
        found = alarmed_at(scores, stderr)
        assert found is not None
        assert 80 <= found <= 92


def test_within_the_tolerance_nothing_is_found() -> None:
    """A fall that the tolerance allows for is none."""
    rng = np.random.default_rng(0)
    scores = np.where(np.arange(200) < 100, 1.0, 0.5) + 0.1 * rng.standard_normal(200)
    assert alarmed_at(scores, 0.1) is not None
    assert alarmed_at(scores, 0.1, EProcess(tolerance=0.6)) is None


def test_one_outlier_makes_no_reference() -> None:
    """A single eval far above the others neither becomes the best nor the end of the run."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.standard_normal(300)
        scores[100] += 30
        assert alarmed_at(scores, 1.0) is None


def test_without_standard_errors_it_waits() -> None:
    """Until the scale is bounded the note says what is missing, and the number is 0."""
    state = EProcess().start()
    for observation in eval_series([0.0, 5.0] * 10):
        state, evidence = EProcess().step(state, observation)
    assert evidence.value == 0
    assert "needs standard errors" in evidence.note


@given(pairs=st.integers(1, 400), chance=st.floats(1e-8, 0.2))
def test_a_rank_bounds_the_median(pairs: int, chance: float) -> None:
    """The difference of that rank lies below the median with at most this chance; of too few pairs none does."""
    rank = _rank(pairs, math.log(1 / chance))
    if rank is None:
        assert 0.5**pairs > chance
    else:
        assert stats.binom.sf(rank - 1, pairs, 0.5) <= chance


@given(differences=st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=60), data=st.data())
def test_a_bin_rounds_up_by_an_eighth_at_most(differences: list[float], data: st.DataObject) -> None:
    """The upper end of the bin of a rank is above the difference of that rank, by no more than a bin."""
    bins: dict[str, int] = {}
    for difference in differences:
        bins = _binned(bins, difference)
    rank = data.draw(st.integers(1, len(differences)))
    exact = sorted(differences)[rank - 1]
    lowest = max(differences) * 2**-39
    assert exact <= _upper_end(bins, rank) <= max(exact * 1.126, lowest)


def test_the_histogram_is_bounded() -> None:
    """Differences over all sizes that floats have fill no more bins than 40 octaves hold."""
    bins: dict[str, int] = {}
    for exponent in range(-1074, 400):
        bins = _binned(bins, math.ldexp(1.0, exponent))
    assert len(bins) <= 321
    assert sum(bins.values()) == 1474
