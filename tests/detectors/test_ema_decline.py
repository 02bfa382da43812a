"""ema_decline: equal to its definition, and better on slow declines."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from evalstop_detectors import MetricRole, Observation
from evalstop_detectors.detectors.ema_decline import EmaDecline
from evalstop_detectors.detectors.k_decline import KDecline
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.evidence import collect_evidence, collect_values
from tests.detectors.strategies import eval_series, round_values, series


@given(
    weight=st.sampled_from([0.5, 0.25, 0.0625, 1.0]),
    min_delta=st.sampled_from([0.0, 0.25, 1.0]),
    warmup_evals=st.integers(0, 4),
    observations=series({MetricRole.EVAL}, round_values | st.just(math.nan), max_size=12),
)
def test_evidence_equals_exact_fractions(
    weight: float, min_delta: float, warmup_evals: int, observations: list[Observation]
) -> None:
    """Count and turn equal those of weighted means of the whole history in exact fractions."""
    detector = EmaDecline(weight=weight, min_delta=min_delta, warmup_evals=warmup_evals)
    for count, evidence in enumerate(collect_evidence(detector, observations), start=1):
        assert (evidence.value, evidence.turn_step) == count_declines_exactly(detector, observations[:count])


def count_declines_exactly(detector: EmaDecline, history: list[Observation]) -> tuple[int, int | None]:
    """The count and the turn step, with averages in exact fractions."""
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


def test_single_upward_steps_do_not_reset_the_count() -> None:
    """In a slow decline with single upward steps the average keeps declining, while k_decline starts again."""
    scores = [10, 9, 8, 8.2, 7, 6, 6.2, 5, 4]
    assert collect_values(EmaDecline(weight=0.3), eval_series(scores))[-1] == 8
    assert collect_values(KDecline(), eval_series(scores))[-1] == 2


@pytest.mark.parametrize("weight", [0.01, 0.3, 0.9])
def test_average_is_bias_corrected(weight: float) -> None:
    """The average of a constant series is that constant, so that it never declines."""
    assert not any(collect_values(EmaDecline(weight=weight), eval_series([7.3] * 30)))
