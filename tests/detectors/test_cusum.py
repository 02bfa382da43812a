"""The cumulative sum is Page's by definition, knows its scale, and does what its parameters say."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from evalstop_detectors import MetricRole, Observation
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.cusum import Cusum
from hypothesis import given
from hypothesis import strategies as st

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


def sums(detector: Cusum, observations: Sequence[Observation]) -> list[float]:
    state, found = detector.start(), []
    for observation in observations:
        state, evidence = detector.step(state, observation)
        found.append(evidence.value)
    return found


def by_definition(detector: Cusum, values: Sequence[float]) -> list[float]:
    """The largest sum over all stretches that end with the present value."""
    steps = [off(detector, values, index) for index in range(len(values))]
    found = []
    for end in range(1, len(values) + 1):
        first = end
        while first and steps[first - 1] is not None:
            first -= 1
        stretches = [sum(step or 0.0 for step in steps[begin:end]) for begin in range(first, end)]
        found.append(max([0.0, *stretches]))
    return found


def off(detector: Cusum, values: Sequence[float], index: int) -> float | None:
    """How far the value lies below the reference, in standard deviations and less the allowance; None: not known."""
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
def test_it_is_the_sum_by_definition(detector: Cusum, values: list[float]) -> None:
    """After every eval the statistic is the largest sum of steps over all stretches that end there."""
    assert sums(detector, eval_series(values)) == pytest.approx(by_definition(detector, values), abs=1e-5, rel=1e-6)


def test_one_run_by_hand() -> None:
    """A fall of 3 from a plateau, with a known noise of 1, adds 3 an eval less what the best of noise gains."""
    detector = Cusum(reference="best", window=1, allowance=0.0, sd=1.0)
    found = sums(detector, eval_series([5.0, 5.0, 5.0, 5.0, 2.0, 2.0]))
    luck = [math.sqrt(2 * math.log(count)) for count in (4, 5)]
    assert found == pytest.approx([0, 0, 0, 0, 3 - luck[0], 6 - sum(luck)])


@given(detector=detectors, values=scores, exponent=st.integers(-40, 40))
def test_a_known_noise_has_the_unit_of_the_score(detector: Cusum, values: list[float], exponent: int) -> None:
    """Scores and their known noise in another unit give the same sums."""
    scaled = detector
    if detector.sd is not None:
        scaled = msgspec.structs.replace(detector, sd=math.ldexp(detector.sd, exponent))
    changed = eval_series([math.ldexp(value, exponent) for value in values])
    assert sums(scaled, changed) == sums(detector, eval_series(values))


@given(values=scores, stderr=st.sampled_from([0.25, 2.0]))
def test_given_standard_errors_are_a_known_noise(values: list[float], stderr: float) -> None:
    """A scale that is given with each eval is the same as one that is known beforehand."""
    told = [msgspec.structs.replace(item, stderr=stderr) for item in eval_series(values)]
    assert sums(Cusum(scale="given"), told) == sums(Cusum(sd=stderr), eval_series(values))


@given(values=scores, stderr=st.sampled_from([None, 0.0, -1.0, math.nan, math.inf, 5e-324]))
def test_what_is_no_standard_error_is_none(values: list[float], stderr: float | None) -> None:
    """Where the given scale is missing, zero or absurd the estimate takes its place."""
    told = [msgspec.structs.replace(item, stderr=stderr) for item in eval_series(values)]
    assert sums(Cusum(scale="given"), told) == sums(Cusum(), eval_series(values))


@given(detector=detectors, values=scores, more=st.floats(0.1, 5))
def test_a_larger_allowance_adds_less(detector: Cusum, values: list[float], more: float) -> None:
    """What is put down to noise is taken off every step."""
    allowing = msgspec.structs.replace(detector, allowance=detector.allowance + more)
    pairs = zip(sums(allowing, eval_series(values)), sums(detector, eval_series(values)), strict=True)
    assert all(ours <= theirs + 1e-9 for ours, theirs in pairs)


@given(detector=detectors, values=scores, last=st.floats(allow_nan=False, allow_infinity=False))
def test_one_eval_weighs_no_more_than_its_cap(detector: Cusum, values: list[float], last: float) -> None:
    """However low one eval lies, it adds at most `largest_sigmas`."""
    found = [0.0, *sums(detector, eval_series([*values, last]))]
    assert found[-1] <= found[-2] + detector.largest_sigmas


@pytest.mark.parametrize("reference", ["best", "mean"])
def test_it_tells_a_turn_from_a_plateau(reference: str) -> None:
    """A plateau under noise stays far below the threshold; a fall by 2 standard deviations passes it, and is placed."""
    detector = msgspec.convert({"reference": reference, "allowance": 0.5}, Cusum)
    flat, turned, turns = [], [], []
    for seed in range(20):
        chance = random.Random(seed)
        noise = [chance.gauss(0, 1) for _ in range(300)]
        flat.append(max(sums(detector, eval_series(noise))))
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


def test_the_notes_say_what_is_missing() -> None:
    """Before there is a reference, and while the eval score stands still, the note says so."""
    detector = Cusum(reference="best")
    state, notes = detector.start(), []
    for observation in eval_series([1.0] * 7 + [2.0, 2.0]):
        state, evidence = detector.step(state, observation)
        notes.append(evidence.note)
    assert notes[0] == "needs 5 more evals"
    assert notes[4] == "needs 1 more eval"
    assert notes[6] == "the eval score has not moved yet"
    assert notes[8].startswith("the eval score lies below")


def test_its_state_stays_small() -> None:
    """After thousands of evals the state is as large as after a hundred."""
    chance = random.Random(1)
    sizes = []
    state = Cusum().start()
    for step in range(3000):
        state, _ = Cusum().step(state, Observation(MetricRole.EVAL, step, chance.gauss(0, 1)))
        sizes.append(len(msgspec.json.encode(state)))
    assert max(sizes[100:]) < 2500
