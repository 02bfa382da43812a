"""Location of the turn in hindsight: after a rise and a fall, None without a fall, never an exception."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import msgspec
import numpy as np
import pytest
from evalstop_detectors.checkpoint.change_point import FEWEST, ChangePoint, find_knots, locate_change_point
from evalstop_detectors.checkpoint.choice import Score
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detectors.strategies import round_values, values

FEW_EXAMPLES = settings(max_examples=20)


def build_scores(values: list[float], stride: int = 1) -> list[Score]:
    return [Score(stride * index, value) for index, value in enumerate(values)]


def create_hill(length: int, peak: int, sd: float = 0.0, seed: int = 0, plateau: int = 0) -> list[float]:
    """A rise to 1 at `peak`, `plateau` flat evals, and a fall at the same pace, with noise."""
    rng = random.Random(seed)
    clean = [1 - max(peak - i, i - peak - plateau, 0) / max(peak, length - 1 - peak) for i in range(length)]
    return [value + rng.gauss(0, sd) for value in clean]


@pytest.mark.slow
@FEW_EXAMPLES
@given(length=st.integers(12, 300), share=st.floats(0.2, 0.8))
def test_turn_without_noise_is_found(length: int, share: float) -> None:
    """For two straight lines, the turn is within a block of their intersection."""
    peak = round(share * (length - 1))
    turn = locate_change_point(build_scores(create_hill(length, peak)))
    assert turn is not None
    assert abs(turn.step - peak) <= 2 + length // 100
    assert turn.low_step <= turn.step <= turn.high_step


@pytest.mark.slow
@pytest.mark.parametrize("length", [30, 100, 1000])
def test_noisy_turn_is_found(length: int) -> None:
    """With noise of a tenth of the gain, 18 of 20 turns are within a tenth of the run, and 16 intervals cover it."""
    peak = length // 2
    turns = [locate_change_point(build_scores(create_hill(length, peak, 0.1, seed))) for seed in range(20)]
    near = [item for item in turns if item is not None and abs(item.step - peak) <= 0.1 * length]
    covering = [item for item in turns if item is not None and item.low_step <= peak <= item.high_step]
    assert len(near) >= 18
    assert len(covering) >= 16


def test_turn_is_at_the_end_of_a_plateau() -> None:
    """After a rise and a plateau, the turn is where the fall starts."""
    turn = locate_change_point(build_scores(create_hill(90, 20, 0.02, plateau=40)))
    assert turn is not None
    assert abs(turn.step - 60) <= 6


def test_fall_from_the_start_turns_at_the_first_eval() -> None:
    """A run that never rose has its turn at the first eval and a gain of 0."""
    turn = locate_change_point(build_scores([-0.1 * index for index in range(30)]))
    assert turn is not None
    assert (turn.step, turn.gain) == (0, 0.0)
    assert turn.drop == pytest.approx(2.9)


@FEW_EXAMPLES
@given(length=st.integers(0, 60), sd=st.sampled_from([0.0, 0.01, 0.1]), seed=st.integers(0, 50))
def test_rise_has_no_turn(length: int, sd: float, seed: int) -> None:
    """A run that rises to the end has no turn, with or without noise."""
    rng = random.Random(seed)
    values = [index + length * rng.gauss(0, sd) / 10 for index in range(length)]
    assert locate_change_point(build_scores(values)) is None


@FEW_EXAMPLES
@given(value=st.sampled_from([0.0, 1.0, -3.5, 1e300, 5e-324]), length=st.integers(0, 40))
def test_constant_run_has_no_turn(value: float, length: int) -> None:
    """Equal scores have no turn, whatever their value and number."""
    assert locate_change_point(build_scores([value] * length)) is None


@FEW_EXAMPLES
@given(st.lists(values, max_size=30), st.integers(1, 10**6))
def test_turn_is_an_observed_step(drawn: list[float], stride: int) -> None:
    """For any scores, the steps of a turn are steps of finite scores, and gain and drop are finite."""
    turn = locate_change_point(build_scores(drawn, stride))
    if turn is not None:
        finite_steps = {stride * index for index, value in enumerate(drawn) if math.isfinite(value)}
        assert {turn.step, turn.low_step, turn.high_step} <= finite_steps
        assert turn.low_step <= turn.step <= turn.high_step
        assert math.isfinite(turn.gain)
        assert 0 < turn.drop < math.inf
        assert msgspec.json.decode(msgspec.json.encode(turn), type=ChangePoint) == turn


@FEW_EXAMPLES
@given(
    drawn=st.lists(round_values, min_size=FEWEST, max_size=30), exponent=st.integers(-40, 40), stride=st.integers(1, 9)
)
def test_turn_is_invariant_to_units(drawn: list[float], exponent: int, stride: int) -> None:
    """Scores in another unit have their turn at the same eval, with gain and drop in that unit."""
    plain = locate_change_point(build_scores(drawn))
    scaled = locate_change_point(build_scores([math.ldexp(value, exponent) for value in drawn], stride))
    if plain is None:
        assert scaled is None
    else:
        assert scaled == ChangePoint(
            stride * plain.step,
            stride * plain.low_step,
            stride * plain.high_step,
            math.ldexp(plain.gain, exponent),
            math.ldexp(plain.drop, exponent),
        )


@FEW_EXAMPLES
@given(st.lists(values, max_size=20), st.sets(st.integers(0, 40)))
def test_nan_is_ignored(drawn: list[float], indices: set[int]) -> None:
    """NaN between the scores does not change the turn."""
    clean = [Score(2 * index, value) for index, value in enumerate(drawn)]
    mixed = sorted([*clean, *(Score(2 * index + 1, math.nan) for index in indices)], key=lambda score: score.step)
    assert locate_change_point(mixed) == locate_change_point(clean)


def measure_cost(values: list[float], knots: tuple[int, ...], penalty: float) -> float:
    """The squared misfit of the line through the values at these knots, and the penalty for each piece."""
    line = np.interp(range(len(values)), knots, [values[knot] for knot in knots])
    return float(np.sum((np.array(values) - line) ** 2)) + penalty * (len(knots) - 1)


@settings(max_examples=200)
@given(st.lists(st.integers(-9, 9), min_size=3, max_size=14), st.sampled_from([1.0, 30.0, 200.0]))
def test_knots_are_the_cheapest(drawn: list[int], penalty: float) -> None:
    """No other line costs less: all are tried whose pieces span three evals or more, the first one two."""
    values, last = [float(value) for value in drawn], len(drawn) - 1
    choices = [
        (0, *inner, last)
        for count in range(last)
        for inner in combinations(range(2, last - 2), count)
        if all(b - a >= 3 for a, b in pairwise(inner))
    ]
    knots = tuple(find_knots(np.array(values), penalty).tolist())
    assert knots in choices
    least = min(measure_cost(values, choice, penalty) for choice in choices)
    assert measure_cost(values, knots, penalty) == pytest.approx(least)


def test_turn_in_a_long_run_is_found() -> None:
    """In a run of 20,000 evals, which is averaged in blocks, the turn is found within 1,000 evals."""
    turn = locate_change_point(build_scores(create_hill(20_000, 9_000, 0.2)))
    assert turn is not None
    assert abs(turn.step - 9_000) < 1_000
