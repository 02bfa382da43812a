"""divergence: an alarm if the eval falls while the proxy rises, and none on either alone."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from evalstop_detectors import Evidence, MetricRole, Observation
from evalstop_detectors.detectors.divergence import Divergence, _fit_regression
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import eval_series, series

UP = [index / 60 for index in range(121)]
RISE_AND_FALL = [1 - abs(index - 60) / 60 for index in range(121)]
FLAT = [0.0] * 121


def run_detector(
    eval_scores: list[float],
    proxy: list[float],
    sd: float = 0.05,
    *,
    seed: int = 0,
    common: float = 0.0,
    control_variate: bool = True,
) -> list[Evidence]:
    """The evidence after each eval; `common` is the correlation between the noise of eval and proxy."""
    rng, detector = random.Random(seed), Divergence(control_variate=control_variate)
    state, collected = detector.start(), []
    for index, (eval_score, proxy_score) in enumerate(zip(eval_scores, proxy, strict=True)):
        proxy_noise = rng.gauss(0, 1)
        eval_noise = common * proxy_noise + math.sqrt(1 - common**2) * rng.gauss(0, 1)
        state, _ = detector.step(state, Observation(MetricRole.PROXY, index, proxy_score + sd * proxy_noise))
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, eval_score + sd * eval_noise))
        collected.append(evidence)
    return collected


def highest_value(evidence: list[Evidence]) -> float:
    """The highest value of the evidence."""
    return max(item.value for item in evidence)


def test_falling_eval_under_rising_proxy_alarms() -> None:
    """After the peak of the eval under a rising proxy the stop threshold is reached, with the turn near the peak."""
    evidence = run_detector(RISE_AND_FALL, UP)
    stops = [item for item in evidence if item.reaches(Divergence().thresholds.stop_at)]
    assert stops
    assert highest_value(evidence[:62]) < 4
    assert stops[-1].turn_step is not None
    assert abs(stops[-1].turn_step - 60) <= 12
    assert "while the proxy did not" in stops[-1].note


@pytest.mark.parametrize(
    ("eval_scores", "proxy"),
    [(UP, UP), (UP, FLAT), (FLAT, UP), (FLAT, FLAT), (RISE_AND_FALL, RISE_AND_FALL), (UP, UP[::-1])],
)
def test_no_alarm_unless_the_eval_alone_falls(eval_scores: list[float], proxy: list[float]) -> None:
    """A flat or rising eval, and one that falls together with its proxy, stay below the threshold."""
    for seed in range(5):
        assert highest_value(run_detector(eval_scores, proxy, seed=seed)) < 4


def test_one_role_alone_is_no_evidence() -> None:
    """A proxy without evals, or evals without a proxy, give a value of 0."""
    detector = Divergence()
    for role in (MetricRole.PROXY, MetricRole.EVAL):
        state = detector.start()
        for index in range(50):
            state, evidence = detector.step(state, Observation(role, index, float(-index)))
            assert evidence.value == 0
            assert evidence.note == "waits for an eval and a proxy before it"


def test_common_noise_is_subtracted() -> None:
    """With large common noise the control variate raises the evidence, and the note says by how much noise falls."""
    plain, corrected = (
        [run_detector(RISE_AND_FALL, UP, 0.3, seed=seed, common=0.9, control_variate=on)[-1] for seed in range(20)]
        for on in (False, True)
    )
    assert sum(item.value for item in corrected) > 1.1 * sum(item.value for item in plain)
    assert any("of the eval score's noise" in item.note for item in corrected)
    assert not any("of the eval score's noise" in item.note for item in plain)


def test_independent_noise_is_not_subtracted() -> None:
    """With independent noise the control variate changes the evidence by less than 15 %."""
    plain, corrected = (
        [run_detector(RISE_AND_FALL, UP, 0.3, seed=seed, control_variate=on)[-1].value for seed in range(20)]
        for on in (False, True)
    )
    assert sum(corrected) == pytest.approx(sum(plain), rel=0.15)


@given(squares=st.floats(0, 1e300), own=st.floats(0, 1e300), correlation=st.floats(-1, 1), count=st.floats(0, 50))
def test_regression_coefficient_is_shrunk(squares: float, own: float, correlation: float, count: float) -> None:
    """The coefficient is at most that of least squares, and the explained share is between 0 and 1."""
    products = correlation * math.sqrt(squares) * math.sqrt(own)
    coefficient, explained = _fit_regression((count, squares, products, own))
    assert 0 <= explained <= 1
    assert math.isfinite(coefficient)
    assert coefficient == 0 or abs(coefficient) <= abs(products / squares)


def test_slow_turn_is_found() -> None:
    """A slow turn is found in 3,000 evals."""
    n = 3000
    turning, rising = [1 - abs(index - n / 2) / n for index in range(n)], [index / n for index in range(n)]
    last = run_detector(turning, rising, 0.2)[-1]
    assert last.value > 8
    assert last.turn_step is not None
    assert abs(last.turn_step - n / 2) < n / 4


@given(observations=series({MetricRole.PROXY, MetricRole.EVAL}, max_size=30), shift=st.integers(-100, 100))
def test_evidence_is_invariant_to_the_unit_of_the_proxy(observations: list[Observation], shift: int) -> None:
    """A proxy in another unit gives the same evidence."""
    detector = Divergence(least_evals=2)
    plain = scaled = detector.start()
    for item in observations:
        if math.isfinite(item.value) and abs(item.value) > 1e30:
            continue
        plain, expected = detector.step(plain, item)
        scaled_item = (
            msgspec.structs.replace(item, value=math.ldexp(item.value, 7)) if item.role is MetricRole.PROXY else item
        )
        scaled, actual = detector.step(scaled, scaled_item)
        assert (actual.value, actual.turn_step) == pytest.approx((expected.value, expected.turn_step))


def test_note_counts_missing_evals() -> None:
    """The note counts the evals with a proxy that are still needed."""
    detector = Divergence()
    state, _ = detector.step(detector.start(), Observation(MetricRole.PROXY, 0, 1.0))
    for index, observation in enumerate(eval_series([3.0, 2.0, 1.0])):
        state, evidence = detector.step(state, observation)
        assert evidence.note == f"needs {5 - index} more eval{'s' * (index < 4)}, each with a proxy before it"
