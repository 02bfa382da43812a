"""Declines of a moving average: what smoothing buys, and that without it the rule is the published one."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from evalstop_detectors import MetricRole, Observation
from evalstop_detectors.detectors.ema_decline import EmaDecline
from evalstop_detectors.detectors.k_decline import KDecline
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import AnyDetector, eval_series, round_values, series


def counts(detector: AnyDetector, observations: list[Observation]) -> list[float]:
    state, found = detector.start(), []
    for observation in observations:
        state, evidence = detector.step(state, observation)
        found.append(evidence.value)
    return found


@given(observations=series({MetricRole.EVAL}, round_values))
def test_with_all_weight_on_the_new_value_it_is_k_decline(observations: list[Observation]) -> None:
    """An average of the newest value alone declines where the values do."""
    assert counts(EmaDecline(weight=1.0), observations) == counts(KDecline(), observations)


@given(
    weight=st.sampled_from([0.5, 0.25, 0.0625, 1.0]),
    min_delta=st.sampled_from([0.0, 0.25, 1.0]),
    warmup_evals=st.integers(0, 4),
    observations=series({MetricRole.EVAL}, round_values | st.just(math.nan), max_size=12),
)
def test_it_equals_its_definition(
    weight: float, min_delta: float, warmup_evals: int, observations: list[Observation]
) -> None:
    """Where fractions are exact, the count and the turn are those of weighted means of the whole history."""
    detector = EmaDecline(weight=weight, min_delta=min_delta, warmup_evals=warmup_evals)
    state = detector.start()
    for count, observation in enumerate(observations, start=1):
        state, evidence = detector.step(state, observation)
        assert (evidence.value, evidence.turn_step) == declines(detector, observations[:count])


def declines(detector: EmaDecline, history: list[Observation]) -> tuple[int, int | None]:
    evals, averages = [item for item in history if math.isfinite(item.value)], list[Fraction]()
    for count in range(1, len(evals) + 1):
        shares = [Fraction(1 - detector.weight) ** (count - 1 - index) for index in range(count)]
        weighted = zip(shares, evals[:count], strict=True)
        averages.append(sum((share * Fraction(item.value) for share, item in weighted), Fraction()) / sum(shares))
    length = 0
    while length < len(evals) - max(1, detector.warmup_evals):
        after, before = averages[-1 - length], averages[-2 - length]
        if after >= before - Fraction(detector.min_delta):
            break
        length += 1
    return (length, evals[-length - 1].step) if length else (0, None)


def test_one_upward_step_does_not_end_a_slow_fall() -> None:
    """A fall with single upward steps goes on in the average, where the plain rule starts anew."""
    scores = [10, 9, 8, 8.2, 7, 6, 6.2, 5, 4]
    assert counts(EmaDecline(weight=0.3), eval_series(scores))[-1] == 8
    assert counts(KDecline(), eval_series(scores))[-1] == 2


@pytest.mark.parametrize("weight", [0.01, 0.3, 0.9])
def test_the_first_values_do_not_pull_the_average_to_nothing(weight: float) -> None:
    """Bias-corrected, the average of a constant is the constant: it neither rises nor falls."""
    assert not any(counts(EmaDecline(weight=weight), eval_series([7.3] * 30)))
