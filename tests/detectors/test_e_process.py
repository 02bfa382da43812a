"""e_process: equal to its definition, false alarms within alpha, falls found, and its scale bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from evalstop_detectors import MetricRole, Observation
from evalstop_detectors.detectors.e_process import EProcess, _binned, _rank, _upper_end
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from tests.detectors.evidence import collect_evidence
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


def find_alarm(scores: Floats, stderr: float | None, detector: EProcess | None = None) -> int | None:
    """The index of the first score that reaches the threshold to stop, or None."""
    detector = detector or EProcess()
    state, stop_at = detector.start(), detector.thresholds.stop_at
    for index, score in enumerate(scores):
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, score, stderr))
        if evidence.reaches(stop_at):
            return index
    return None


@pytest.mark.parametrize("stderr_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_evidence_equals_definition(seed: int, stderr_share: float) -> None:
    """Value and turn equal those of all bets ever placed, computed from the whole history."""
    rng = np.random.default_rng(seed)
    clean = np.interp(np.arange(140), [0, 60, 139], [0, 3, 3 - seed])
    detector = EProcess(alpha=float(rng.choice([0.01, 0.5])), tolerance=float(rng.choice([0.0, 0.2])))
    state, history = detector.start(), list[Observation]()
    for index, score in enumerate(clean + 0.3 * rng.standard_t(3, 140)):
        stderr = float(rng.uniform(0.2, 0.4)) if rng.random() < stderr_share else None
        history.append(Observation(MetricRole.EVAL, index, float(score), stderr))
    for observation, (value, turn) in zip(history, compute_by_definition(detector, history), strict=True):
        state, evidence = detector.step(state, observation)
        assert evidence.value == pytest.approx(value, rel=1e-9, abs=1e-9)
        assert evidence.turn_step == turn


def compute_by_definition(detector: EProcess, history: list[Observation]) -> Iterator[tuple[float, int | None]]:
    """The value and the turn step after each eval, from all bets and bounds up to it."""
    y = [item.value - history[0].value for item in history]
    reference, turn, value, reported_turn = -math.inf, None, 0.0, None
    bets, clipped, variances, differences = list[tuple[float, float]](), list[float](), list[float](), list[float]()
    for index, item in enumerate(history):
        n = index + 1
        sd = item.stderr or upper_scale_bound(differences, detector.alpha)
        if sd is not None and reference > -math.inf:
            bets.append((1 / (2.10975 * (len(bets) + 2) * math.log(len(bets) + 2) ** 2), 0.0))
            z = min((reference - detector.tolerance - y[index]) / sd, 4.0)
            bets = [(share, total + z) for share, total in bets]
            wealth = 1 - sum(share for share, _ in bets)
            for b in (0.125, 0.25, 0.5, 1.0):
                ages = range(len(bets), 0, -1)
                wealth += sum(s * math.exp(b * g - k * b * b / 2) for (s, g), k in zip(bets, ages, strict=True)) / 4
            value = max(math.log(wealth), 0.0)
            reported_turn = turn if value > 0 else None
        clipped.append(y[index] if sd is None else min(y[index], (y[index - 1] if index else 0.0) + 4 * sd))
        variances.append(math.inf if sd is None else sd * sd)
        bounds = [lower_bound(detector.alpha, clipped[-1:], variances[-1:], 0, n)]
        for power in range(10):
            if n % 2**power == 0 and n >= 2 ** (power + 1):
                size = 2 ** (power + 1)
                bounds.append(lower_bound(detector.alpha, clipped[-size:], variances[-size:], power + 1, n // 2**power))
        if max(bounds) > reference:
            reference, turn = max(bounds), item.step
        if index % 2:
            differences.append(abs(y[index] - y[index - 1]))
        yield value, reported_turn


def lower_bound(alpha: float, values: list[float], variances: list[float], power: int, index: int) -> float:
    """The lower confidence bound of a mean, at the share of alpha of this block size and index."""
    share = alpha / 4 / ((power + 1) * (power + 2)) / (index * (index + 1))
    mean, variance = sum(values) / len(values), sum(variances) / len(variances)
    return mean - math.sqrt(2 * math.log(1 / share) * variance / len(values))


def upper_scale_bound(differences: list[float], alpha: float) -> float | None:
    """The difference at the smallest rank that is rarely below the median, rounded up to 1/8 octave."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "runs"),
    [(100, 60), *(pytest.param(*size, marks=pytest.mark.nightly) for size in ((20, 150), (500, 15), (2500, 4)))],
)
@pytest.mark.parametrize("stderr", [None, 1.0])
@pytest.mark.parametrize("noise", [gaussian, student_t3, weakly_autocorrelated])
def test_false_alarm_rate_is_at_most_alpha(
    size: int, runs: int, stderr: float | None, noise: Callable[[np.random.Generator, int], Floats]
) -> None:
    """The number of flat runs that are stopped is consistent with a probability of alpha, at every length.

    t3 and AR(1) noise violate the assumptions, but not detectably at these lengths and numbers of runs.
    """
    alpha, rng = 0.05, np.random.default_rng(size)
    stopped = sum(find_alarm(noise(rng, size), stderr, EProcess(alpha=alpha)) is not None for _ in range(runs))
    assert stats.binom.sf(stopped - 1, runs, alpha) > 1e-3


def test_rising_runs_raise_no_alarm() -> None:
    """A run that rises, suddenly or slowly, is never stopped."""
    rng = np.random.default_rng(0)
    for index in range(20):
        clean = np.linspace(0, 5, 200) if index % 2 else np.where(np.arange(200) < 100, 0.0, 30.0)
        assert find_alarm(clean + rng.standard_normal(200), 1.0) is None


@pytest.mark.parametrize("stderr", [None, 0.1])
def test_fall_is_found(stderr: float | None) -> None:
    """A fall of 10 sd is found within 12 evals, and not before it happens."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = np.where(np.arange(120) < 80, 1.0, 0.0) + 0.1 * rng.standard_normal(120)
        alarm = find_alarm(scores, stderr)
        assert alarm is not None
        assert 80 <= alarm <= 92


def test_fall_within_tolerance_is_ignored() -> None:
    """A fall smaller than `tolerance` raises no alarm; without a tolerance it does."""
    rng = np.random.default_rng(0)
    scores = np.where(np.arange(200) < 100, 1.0, 0.5) + 0.1 * rng.standard_normal(200)
    assert find_alarm(scores, 0.1) is not None
    assert find_alarm(scores, 0.1, EProcess(tolerance=0.6)) is None


def test_single_outlier_raises_no_alarm() -> None:
    """A single eval far above the others does not become the reference for later evals."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.standard_normal(300)
        scores[100] += 30
        assert find_alarm(scores, 1.0) is None


def test_note_asks_for_standard_errors() -> None:
    """Without standard errors and with too few pairs the value is 0, and the note asks for them."""
    evidence = collect_evidence(EProcess(), eval_series([0.0, 5.0] * 10))[-1]
    assert evidence.value == 0
    assert "needs standard errors" in evidence.note


@given(pairs=st.integers(1, 400), probability=st.floats(1e-8, 0.2))
def test_rank_bounds_the_median(pairs: int, probability: float) -> None:
    """The order statistic of that rank is below the median with at most this probability; None for too few pairs."""
    rank = _rank(pairs, math.log(1 / probability))
    if rank is None:
        assert 0.5**pairs > probability
    else:
        assert stats.binom.sf(rank - 1, pairs, 0.5) <= probability


@given(differences=st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=60), data=st.data())
def test_bin_rounds_up_by_at_most_an_eighth(differences: list[float], data: st.DataObject) -> None:
    """The upper end of a bin is at least the difference of its rank, and at most one bin larger."""
    bins: dict[str, int] = {}
    for difference in differences:
        bins = _binned(bins, difference)
    rank = data.draw(st.integers(1, len(differences)))
    exact = sorted(differences)[rank - 1]
    lowest = max(differences) * 2**-39
    assert exact <= _upper_end(bins, rank) <= max(exact * 1.126, lowest)


def test_histogram_size_is_bounded() -> None:
    """Differences of any magnitude fill at most the bins of 40 octaves."""
    bins: dict[str, int] = {}
    for exponent in range(-1074, 400):
        bins = _binned(bins, math.ldexp(1.0, exponent))
    assert len(bins) <= 321
    assert sum(bins.values()) == 1474
