"""Declines of a moving average: what smoothing buys, and that without it the rule is the published one."""

from __future__ import annotations

import pytest
from evalstop_detectors import Observation, Signal
from evalstop_detectors.ema_decline import EmaDecline
from evalstop_detectors.k_decline import KDecline
from hypothesis import given

from tests.detectors.strategies import AnyDetector, eval_series, round_values, series


def counts(detector: AnyDetector, observations: list[Observation]) -> list[float]:
    state, found = detector.start(), []
    for observation in observations:
        state, evidence = detector.step(state, observation)
        found.append(evidence.value)
    return found


@given(observations=series({Signal.EVAL}, round_values))
def test_with_all_weight_on_the_new_value_it_is_k_decline(observations: list[Observation]) -> None:
    """An average of the newest value alone declines where the values do."""
    assert counts(EmaDecline(weight=1.0), observations) == counts(KDecline(), observations)


def test_one_upward_step_does_not_end_a_slow_fall() -> None:
    """A fall with single upward steps goes on in the average, where the plain rule starts anew."""
    scores = [10, 9, 8, 8.2, 7, 6, 6.2, 5, 4]
    assert counts(EmaDecline(weight=0.3), eval_series(scores))[-1] == 8
    assert counts(KDecline(), eval_series(scores))[-1] == 2


@pytest.mark.parametrize("weight", [0.01, 0.3, 0.9])
def test_the_first_values_do_not_pull_the_average_to_nothing(weight: float) -> None:
    """Bias-corrected, the average of a constant is the constant: it neither rises nor falls."""
    assert not any(counts(EmaDecline(weight=weight), eval_series([7.3] * 30)))
