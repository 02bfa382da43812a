"""cusum: equal to Page's definition, and what it finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.cusum import Cusum
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.evidence import collect_evidence, collect_values
from tests.detectors.strategies import eval_series

scores = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), max_size=40)
detectors = st.builds(
    Cusum, allowance=st.sampled_from([0.0, 0.5, 2.0]), largest_sigmas=st.sampled_from([1.0, 4.0, 1e6])
)


def compute_by_definition(detector: Cusum, values: Sequence[float]) -> list[float]:
    """The largest sum of steps over all ranges that end with the current value."""
    steps = [compute_step(detector, values, index) for index in range(len(values))]
    values_by_end = []
    for end in range(1, len(values) + 1):
        first = end
        while first and steps[first - 1] is not None:
            first -= 1
        range_sums = [sum(step or 0.0 for step in steps[start:end]) for start in range(first, end)]
        values_by_end.append(max([0.0, *range_sums]))
    return values_by_end


def compute_step(detector: Cusum, values: Sequence[float], index: int) -> float | None:
    """How far the value is below the reference in sd, minus the allowance; None while the noise is unknown."""
    before = values[:index]
    if index < 4:
        return None
    noise = NoiseState()
    for value in before:
        noise = advance(noise, value)
    sd = estimate(noise).sd * estimate(noise).inflation
    if sd == 0:
        return None
    below = sum(values[: index + 1]) / (index + 1) - values[index]
    return min(max(below / sd, -detector.largest_sigmas), detector.largest_sigmas) - detector.allowance


@given(detector=detectors, values=scores)
def test_value_equals_definition(detector: Cusum, values: list[float]) -> None:
    """After each eval the value is the largest sum of steps over all ranges that end there."""
    assert collect_values(detector, eval_series(values)) == pytest.approx(
        compute_by_definition(detector, values), abs=1e-5, rel=1e-6
    )


def test_turn_is_found_and_plateau_is_not() -> None:
    """Noisy plateaus stay below the threshold; a fall by 2.5 sd reaches it, with the turn placed near it."""
    detector = Cusum(allowance=0.5)
    flat, turned, turns = [], [], []
    for seed in range(20):
        rng = random.Random(seed)
        noise = [rng.gauss(0, 1) for _ in range(300)]
        flat.append(max(collect_values(detector, eval_series(noise))))
        state, passed = detector.start(), False
        for item in eval_series([value - (2.5 if index >= 150 else 0) for index, value in enumerate(noise)]):
            state, evidence = detector.step(state, item)
            if not passed and evidence.reaches(detector.thresholds.suspect_at):
                passed = True
                turns.append(evidence.turn_step)
        turned.append(passed)
    assert max(flat) < (detector.thresholds.suspect_at or 0)
    assert all(turned)
    assert all(turn is not None and 140 <= turn <= 160 for turn in turns)


def test_note_explains_a_missing_value() -> None:
    """The note says that evals are missing, or that the eval has not changed."""
    notes = [item.note for item in collect_evidence(Cusum(), eval_series([1.0] * 7 + [2.0, 2.0]))]
    assert notes[0] == "needs 4 more evals"
    assert notes[3] == "needs 1 more eval"
    assert notes[6] == "the eval score has not moved yet"
    assert notes[8].startswith("the eval score lies below")
