"""focus: the pruned likelihood ratio equals that over all change points."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.focus import Focus
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import collect_evidence, collect_values, eval_series

scores = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-100, 100).map(lambda x: round(x, 3))), max_size=60
)


def mean_fall(values: Sequence[float], before: int) -> float:
    """The fall of the mean after `before` values, scaled to the variance of one value."""
    after = len(values) - before
    fall = sum(values[:before]) / before - sum(values[before:]) / after
    return fall * math.sqrt(before * after / len(values))


def compute_over_all_change_points(values: Sequence[float]) -> list[float]:
    """The likelihood ratio by brute force."""
    ratios, noise = [], NoiseState()
    for end in range(1, len(values) + 1):
        known = estimate(noise)
        sd = known.sd * known.inflation
        noise = advance(noise, values[end - 1])
        changes = [mean_fall(values[:end], before) for before in range(1, end)]
        if end < 4 or sd == 0:
            ratios.append(0.0)
            continue
        ratios.append(max([0.0, *changes]) ** 2 / sd**2 / 2)
    return ratios


@given(values=scores)
def test_ratio_equals_all_change_points(values: list[float]) -> None:
    """After each eval the value equals the maximum over all change points, although only a few are kept."""
    expected = compute_over_all_change_points(values)
    assert collect_values(Focus(candidates=128), eval_series(values)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(values=scores, candidates=st.integers(4, 8))
def test_fewer_candidates_never_raise_the_value(values: list[float], candidates: int) -> None:
    """With a limit on the candidates the value is at most that without a limit."""
    capped = collect_values(Focus(candidates=candidates), eval_series(values))
    whole = collect_values(Focus(candidates=128), eval_series(values))
    assert all(limited <= full * (1 + 1e-9) for limited, full in zip(capped, whole, strict=True))


def test_candidate_limit_costs_at_most_1_percent() -> None:
    """On a steady decline, where every eval is a candidate, 32 candidates give the value within 1 %."""
    rng = random.Random(3)
    values = [-0.01 * index**1.2 + rng.gauss(0, 0.001) for index in range(400)]
    capped = Focus(candidates=32)
    whole = compute_over_all_change_points(values)
    state = capped.start()
    for item in eval_series(values):
        state, evidence = capped.step(state, item)
    assert len(state.upper) == 32
    assert 0.99 * whole[-1] <= evidence.value <= whole[-1] * (1 + 1e-9)


def test_turn_is_placed_at_the_fall() -> None:
    """After a plateau and a fall the turn is near the last eval before the fall."""
    levels = [8.0] * 100 + [3.0] * 50
    for seed in range(10):
        rng = random.Random(seed)
        last = collect_evidence(Focus(), eval_series([level + rng.gauss(0, 1) for level in levels]))[-1]
        assert last.reaches(Focus().thresholds.stop_at)
        assert last.turn_step is not None
        assert 95 <= last.turn_step <= 103


def test_recovered_dip_is_forgotten_slowly() -> None:
    """After a dip and a return to the old level the value falls, but the dip is still the largest fall."""
    values = [0.0, 0.1] * 20 + [-3.0, -3.1] * 10
    fallen = collect_evidence(Focus(), eval_series(values))[-1]
    assert fallen.reaches(Focus().thresholds.stop_at)
    recovered = collect_evidence(Focus(), eval_series([*values, *[0.0, 0.1] * 10]))[-1]
    assert recovered.value < fallen.value
    assert recovered.turn_step == fallen.turn_step == 39
