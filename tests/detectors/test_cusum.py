"""cusum: equal to Page's definition, the noise scale, and the effect of the parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.cusum import Cusum
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.evidence import collect_evidence, collect_values
from tests.detectors.strategies import eval_series

scores = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), max_size=40)
detectors = st.builds(
    Cusum,
    reference=st.sampled_from(["best", "mean"]),
    window=st.integers(1, 6),
    allowance=st.sampled_from([0.0, 0.5, 2.0]),
    largest_sigmas=st.sampled_from([1.0, 4.0, 1e6]),
    sd=st.none() | st.sampled_from([0.5, 3.0]),
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
    """How far the value is below the reference in sd, minus the allowance; None while the reference is unknown."""
    before, width = values[:index], detector.window
    if index < (max(4, width) if detector.reference == "best" else 4):
        return None
    noise = NoiseState()
    for value in before:
        noise = advance(noise, value)
    sd = detector.sd or estimate(noise).sd * estimate(noise).inflation
    if sd == 0:
        return None
    if detector.reference == "best":
        best = max(sum(before[end - width : end]) / width for end in range(width, index + 1))
        below = best - sd * math.sqrt(2 * math.log(index / width) / width) - values[index]
    else:
        below = sum(values[: index + 1]) / (index + 1) - values[index]
    return min(max(below / sd, -detector.largest_sigmas), detector.largest_sigmas) - detector.allowance


@given(detector=detectors, values=scores)
def test_value_equals_definition(detector: Cusum, values: list[float]) -> None:
    """After each eval the value is the largest sum of steps over all ranges that end there."""
    assert collect_values(detector, eval_series(values)) == pytest.approx(
        compute_by_definition(detector, values), abs=1e-5, rel=1e-6
    )


def test_short_run_gives_known_values() -> None:
    """A fall of 3 with a known noise of 1 adds 3 per eval, minus the expected maximum of noise."""
    detector = Cusum(reference="best", window=1, allowance=0.0, sd=1.0)
    actual = collect_values(detector, eval_series([5.0, 5.0, 5.0, 5.0, 2.0, 2.0]))
    expected_maxima = [math.sqrt(2 * math.log(count)) for count in (4, 5)]
    assert actual == pytest.approx([0, 0, 0, 0, 3 - expected_maxima[0], 6 - sum(expected_maxima)])


@given(detector=detectors, values=scores, exponent=st.integers(-40, 40))
def test_known_noise_scales_with_the_scores(detector: Cusum, values: list[float], exponent: int) -> None:
    """Scores and `sd` in another unit give the same values."""
    scaled = detector
    if detector.sd is not None:
        scaled = msgspec.structs.replace(detector, sd=math.ldexp(detector.sd, exponent))
    scaled_scores = eval_series([math.ldexp(value, exponent) for value in values])
    assert collect_values(scaled, scaled_scores) == collect_values(detector, eval_series(values))


@given(values=scores, stderr=st.sampled_from([0.25, 2.0]))
def test_given_standard_errors_equal_known_noise(values: list[float], stderr: float) -> None:
    """With `scale="given"`, equal standard errors give the same values as `sd`."""
    with_stderr = [msgspec.structs.replace(item, stderr=stderr) for item in eval_series(values)]
    assert collect_values(Cusum(scale="given"), with_stderr) == collect_values(Cusum(sd=stderr), eval_series(values))


@given(values=scores, stderr=st.sampled_from([None, 0.0, -1.0, math.nan, math.inf, 5e-324]))
def test_unusable_standard_error_is_ignored(values: list[float], stderr: float | None) -> None:
    """If the standard error is missing, 0, negative or not finite, the estimated noise is used."""
    with_stderr = [msgspec.structs.replace(item, stderr=stderr) for item in eval_series(values)]
    assert collect_values(Cusum(scale="given"), with_stderr) == collect_values(Cusum(), eval_series(values))


@pytest.mark.parametrize("reference", ["best", "mean"])
def test_turn_is_found_and_plateau_is_not(reference: str) -> None:
    """Noisy plateaus stay below the threshold; a fall by 2.5 sd reaches it, with the turn placed near it."""
    detector = msgspec.convert({"reference": reference, "allowance": 0.5}, Cusum)
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
    detector = Cusum(reference="best")
    notes = [item.note for item in collect_evidence(detector, eval_series([1.0] * 7 + [2.0, 2.0]))]
    assert notes[0] == "needs 5 more evals"
    assert notes[4] == "needs 1 more eval"
    assert notes[6] == "the eval score has not moved yet"
    assert notes[8].startswith("the eval score lies below")
