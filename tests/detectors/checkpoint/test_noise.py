"""The noise scale: right on noise of known size, unmoved by trends, jumps and outliers, and following what changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from evalstop_detectors.checkpoint.noise import LARGEST, Noise, NoiseState, advance, estimate, take_values
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.plateau_drop_reference import clip
from tests.detectors.plateau_drop_reference import noise as slow_noise
from tests.detectors.strategies import finite_values


def after(values: Sequence[float], stderr: float | None = None) -> Noise:
    state = NoiseState()
    for value in values:
        state = advance(state, value, stderr)
    return estimate(state)


def normal(seed: int, size: int = 200) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng(seed).standard_normal(size)


def typical(change: float = 0.0, bend: float = 0.0, seeds: int = 20) -> float:
    """The median estimate of unit noise on top of a trend."""
    t = np.arange(200.0)
    return float(np.median([after((normal(seed) + change * t + bend * t**2).tolist()).sd for seed in range(seeds)]))


@pytest.mark.parametrize(("change", "bend"), [(0.0, 0.0), (0.3, 0.0), (-1.0, 0.0), (0.0, 0.002)])
def test_a_trend_is_no_noise(change: float, bend: float) -> None:
    """Unit noise is found to be about 1 on a flat line, and on slopes and bends of a noise's size an eval."""
    share_of_range = 0.02 * 200 * (abs(change) + 200 * bend)
    assert 0.85 < typical(change, bend) < max(1.25, 1.4 * share_of_range)


def test_outliers_and_jumps_are_no_noise() -> None:
    """Neither one value in twenty ten times as far out, nor a jump, makes the noise look half as large again."""
    for seed in range(10):
        values = normal(seed)
        values[::20] *= 10
        values[120:] += 5
        assert 0.6 < after(values.tolist()).sd < 1.5


def test_noise_that_changes_is_followed() -> None:
    """After as many evals as are kept, only the present size of the noise counts."""
    quiet_then_loud = np.concatenate([normal(1), 10 * normal(2, 70)]).tolist()
    assert 7 < after(quiet_then_loud).sd < 14


def test_autocorrelation_makes_means_less_certain() -> None:
    """On the median over runs, the means of AR(1) noise are found to vary twice as much, those of independent noise not
    much more than they do."""
    independent, correlated = [], []
    for seed in range(20):
        shocks, values = normal(seed, 400).tolist(), [0.0]
        for shock in shocks:
            values.append(0.6 * values[-1] + 0.8 * shock)
        independent.append(after(shocks).inflation)
        correlated.append(after(values).inflation)
    assert np.median(correlated) > 1.6
    assert np.median(independent) < 1.3


@given(
    values=st.lists(finite_values | st.sampled_from([0.0, 1.0, 2.0]), max_size=90),
    asked=st.lists(st.booleans(), min_size=90, max_size=90),
)
def test_estimating_on_the_way_changes_nothing(values: list[float], asked: list[bool]) -> None:
    """However often it was asked before, the estimate is that of all values sorted, to the last bit."""
    state, forked = NoiseState(), NoiseState()
    for value, ask in zip(values, asked, strict=False):
        if ask:
            estimate(state)
        forked, state = advance(state, -value), advance(state, value)
    for last, end in ((state, values), (forked, [*values[:-1], *[-value for value in values[-1:]]])):
        counted = [clip(clip(value) - clip(end[0])) for value in end]
        assert (estimate(last).sd, estimate(last).inflation) == slow_noise(counted)


@given(values=st.lists(finite_values, max_size=80), stderr=st.none() | st.floats(0, 1e300))
def test_whatever_arrives_the_noise_is_a_number(values: list[float], stderr: float | None) -> None:
    """The scale is finite and not negative, the inflation at least 1, for the largest and the smallest values."""
    noise = after(values, stderr)
    assert 0 <= noise.sd < math.inf
    assert 1 <= noise.inflation <= 3


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=80), stderr=st.floats(1e-6, 100))
def test_a_given_standard_error_is_a_lower_bound(values: list[float], stderr: float) -> None:
    """The scale is never below the standard errors that the trainer gives."""
    assert after(values, stderr).sd >= stderr * (1 - 1e-12)


@pytest.mark.parametrize("stderr", [0.0, -1.0, math.nan, math.inf])
def test_a_standard_error_that_is_none_is_ignored(stderr: float) -> None:
    """Zero, negative and non-finite standard errors are as good as none."""
    values = normal(3).tolist()
    assert after(values, stderr) == after(values)


def test_a_constant_series_has_no_known_noise() -> None:
    """Of values that repeat themselves, and of a single one, the scale is 0: not known."""
    assert after([]).sd == after([5.0]).sd == after([5.0] * 100).sd == 0


def test_its_memory_is_bounded() -> None:
    """However long the run, and however large the values, the state keeps as little."""
    state = NoiseState()
    for index in range(1000):
        state = advance(state, math.ldexp(1.0, index))
    assert len(state.recent) == 65
    assert state.high <= LARGEST


@given(st.lists(st.tuples(finite_values, st.none() | st.floats(allow_nan=True)), max_size=80))
def test_many_values_at_once(drawn: list[tuple[float, float | None]]) -> None:
    """Taking in many values at once leads to the state that taking them in one by one leads to."""
    state = NoiseState()
    for value, stderr in drawn:
        state = advance(state, value, stderr)
    assert take_values([value for value, _ in drawn], [stderr for _, stderr in drawn]) == state
