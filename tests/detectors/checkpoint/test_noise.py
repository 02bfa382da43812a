"""The noise scale: correct on known noise, robust to trends, jumps and outliers, and adapting to changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from evalstop_detectors.checkpoint.noise import Noise, NoiseState, advance, estimate
from evalstop_detectors.summation import LARGEST
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import finite_values

any_stderr = st.sampled_from([None, None, 0.0, -1.0, math.nan, math.inf]) | st.floats(0, 1e300)


def estimate_after(values: Sequence[float], stderr: float | None = None) -> Noise:
    """The noise estimate after these values."""
    state = NoiseState()
    for value in values:
        state = advance(state, value, stderr)
    return estimate(state)


def create_noise(seed: int, size: int = 200) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Gaussian noise with a standard deviation of 1."""
    return np.random.default_rng(seed).standard_normal(size)


def median_estimate(change: float = 0.0, bend: float = 0.0, seeds: int = 20) -> float:
    """The median estimate for unit noise with a linear and a quadratic trend."""
    t = np.arange(200.0)
    return float(
        np.median(
            [estimate_after((create_noise(seed) + change * t + bend * t**2).tolist()).sd for seed in range(seeds)]
        )
    )


@pytest.mark.parametrize(("change", "bend"), [(0.0, 0.0), (0.3, 0.0), (-1.0, 0.0), (0.0, 0.002)])
def test_trend_does_not_count_as_noise(change: float, bend: float) -> None:
    """The estimate for unit noise is about 1 on a flat line, on slopes and on curves."""
    share_of_range = 0.02 * 200 * (abs(change) + 200 * bend)
    assert 0.85 < median_estimate(change, bend) < max(1.25, 1.4 * share_of_range)


def test_outliers_and_jumps_do_not_count_as_noise() -> None:
    """With 5 % outliers of 10 times the noise and a jump, the estimate stays between 0.6 and 1.5."""
    for seed in range(10):
        values = create_noise(seed)
        values[::20] *= 10
        values[120:] += 5
        assert 0.6 < estimate_after(values.tolist()).sd < 1.5


def test_estimate_adapts_to_changed_noise() -> None:
    """After as many evals as are kept, only the current size of the noise counts."""
    small_then_large = np.concatenate([create_noise(1), 10 * create_noise(2, 70)]).tolist()
    assert 7 < estimate_after(small_then_large).sd < 14


def test_inflation_grows_with_autocorrelation() -> None:
    """The median inflation is above 1.6 for AR(1) noise and below 1.3 for independent noise."""
    independent, correlated = [], []
    for seed in range(20):
        shocks, values = create_noise(seed, 400).tolist(), [0.0]
        for shock in shocks:
            values.append(0.6 * values[-1] + 0.8 * shock)
        independent.append(estimate_after(shocks).inflation)
        correlated.append(estimate_after(values).inflation)
    assert np.median(correlated) > 1.6
    assert np.median(independent) < 1.3


@given(
    values=st.lists(finite_values | st.sampled_from([0.0, 1.0, 2.0]), max_size=90),
    stderrs=st.lists(any_stderr, min_size=90, max_size=90),
    estimate_after_value=st.lists(st.booleans(), min_size=90, max_size=90),
)
def test_earlier_estimates_do_not_change_the_result(
    values: list[float], stderrs: list[float | None], estimate_after_value: list[bool]
) -> None:
    """The estimate equals that of the slow reference bit by bit, whatever estimates were made before."""
    state, forked = NoiseState(), NoiseState()
    for value, stderr, is_estimated in zip(values, stderrs, estimate_after_value, strict=False):
        if is_estimated:
            estimate(state)
        forked, state = advance(state, -value, stderr), advance(state, value, stderr)
    for last_state, history in ((state, values), (forked, [*values[:-1], *[-value for value in values[-1:]]])):
        relative = [clip(clip(value) - clip(history[0])) for value in history]
        expected = estimate_noise(relative, stderrs[: len(values)])
        assert (estimate(last_state).sd, estimate(last_state).inflation) == expected


def test_state_size_is_bounded() -> None:
    """After 1,000 values of growing size, the state holds 65 values, clipped at LARGEST."""
    state = NoiseState()
    for index in range(1000):
        state = advance(state, math.ldexp(1.0, index))
    assert len(state.recent) == 65
    assert state.high <= LARGEST


LARGEST_VALUE = 1e120


def clip(value: float) -> float:
    return min(max(value, -LARGEST_VALUE), LARGEST_VALUE)


def median(numbers: list[float]) -> float:
    ordered = sorted(numbers)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def estimate_noise(values: Sequence[float], stderrs: Sequence[float | None] = ()) -> tuple[float, float]:
    """The noise scale and inflation of these values, which are relative to the first one."""
    count, mean_square = 0, 0.0
    for stderr in stderrs:
        if stderr is not None and 0 < stderr < math.inf:
            count += 1
            mean_square += (min(stderr, LARGEST_VALUE) * min(stderr, LARGEST_VALUE) - mean_square) / count
    n, known, recent = len(values), math.sqrt(mean_square), values[-65:]
    if n < 2:
        return known, 1.0
    least = (max(values) - min(values)) * (0.05 if n <= 8 else 0.02)
    first = median([abs(recent[i + 1] - recent[i]) for i in range(len(recent) - 1)]) / 0.9539
    sd, correlation = first, 0.0
    if n >= 4:
        bends = [abs(recent[i + 2] - 2 * recent[i + 1] + recent[i]) for i in range(len(recent) - 2)]
        sd = min(first, 1.15 * median(bends) / 1.6522)
    if n >= 10 and first > least:
        ratio = median([abs(recent[i + 2] - recent[i]) for i in range(len(recent) - 2)]) / 0.9539 / first
        correlation = min(max(ratio * ratio - 1, 0.0), 0.7) * (n - 2) / (n + 8)
    correlation = min(correlation + 0.4 * 10 / (n + 10), 0.8)
    return max(sd * (1 + 2 / n), least, known), math.sqrt((1 + correlation) / (1 - correlation))
