"""Location of the turn in hindsight: after a rise and a fall, None without a fall, never an exception."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from evalstop_detectors import Score
from evalstop_service.domain.run import ChangePoint
from evalstop_service.evaluation import change_point
from evalstop_service.evaluation.change_point import (
    MIN_SCORES,
    Floats,
    Places,
    find_change_point,
    find_knots,
    find_segments,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detectors.strategies import round_values, values

pytestmark = pytest.mark.skipif(not change_point.AVAILABLE, reason="ruptures has no wheel for this Python")

FEW_EXAMPLES = settings(max_examples=20)


def build_scores(values: list[float], stride: int = 1) -> list[Score]:
    return [Score(stride * index, value) for index, value in enumerate(values)]


def create_hill(length: int, peak: int, sd: float = 0.0, seed: int = 0, plateau: int = 0) -> list[float]:
    """A rise to 1 at `peak`, `plateau` flat evals, and a fall at the same pace, with noise."""
    rng = random.Random(seed)
    clean = [1 - max(peak - i, i - peak - plateau, 0) / max(peak, length - 1 - peak) for i in range(length)]
    return [value + rng.gauss(0, sd) for value in clean]


@pytest.mark.slow
@settings(max_examples=8)
@given(length=st.integers(12, 300), share=st.floats(0.2, 0.8))
def test_turn_without_noise_is_found(length: int, share: float) -> None:
    """For two straight lines, the turn is within a block of their intersection."""
    peak = round(share * (length - 1))
    turn = find_change_point(build_scores(create_hill(length, peak)))
    assert turn is not None
    assert abs(turn.step - peak) <= 2 + length // 100
    assert turn.low_step <= turn.step <= turn.high_step


@pytest.mark.slow
@pytest.mark.parametrize("length", [30, 1000])
def test_noisy_turn_is_found(length: int) -> None:
    """With noise of a tenth of the gain, 11 of 12 turns are within a tenth of the run, and 10 intervals cover it."""
    peak = length // 2
    turns = [find_change_point(build_scores(create_hill(length, peak, 0.1, seed))) for seed in range(12)]
    near = [item for item in turns if item is not None and abs(item.step - peak) <= 0.1 * length]
    covering = [item for item in turns if item is not None and item.low_step <= peak <= item.high_step]
    assert len(near) >= 11
    assert len(covering) >= 10


@pytest.mark.parametrize("sd", [0.0, 0.02])
def test_segments_of_a_hill_with_a_plateau(sd: float) -> None:
    """A rise, a plateau and a fall are found, with borders within their intervals and near the true ones."""
    rise, plateau, fall = find_segments(build_scores(create_hill(90, 20, sd, plateau=40), stride=10))
    assert [rise.kind, plateau.kind, fall.kind] == ["rise", "plateau", "fall"]
    assert (rise.first_step, fall.last_step) == (0, 890)
    for segment, border in ((plateau, 200), (fall, 600)):
        assert segment.low_step <= segment.first_step <= segment.high_step
        assert abs(segment.first_step - border) <= 60
    assert rise.last_step == plateau.first_step
    assert rise.last_score == plateau.first_score == pytest.approx(1, abs=0.05)


@FEW_EXAMPLES
@given(st.lists(values, max_size=30))
def test_segments_join_and_alternate(drawn: list[float]) -> None:
    """For any scores, each segment begins where the last one ends, is of another kind, and has finite scores."""
    segments = find_segments(build_scores(drawn))
    for before, after in pairwise(segments):
        assert before.last_step == after.first_step
        assert before.kind != after.kind
    assert all(item.low_step <= item.first_step <= item.high_step for item in segments)
    assert all(math.isfinite(item.first_score) and math.isfinite(item.last_score) for item in segments)


def test_fall_from_the_start_turns_at_the_first_eval() -> None:
    """A run that never rose has its turn at the first eval."""
    turn = find_change_point(build_scores([-0.1 * index for index in range(30)]))
    assert turn is not None
    assert turn.step == 0


@FEW_EXAMPLES
@given(length=st.integers(0, 60), sd=st.sampled_from([0.0, 0.01, 0.1]), seed=st.integers(0, 50))
def test_rise_has_no_turn(length: int, sd: float, seed: int) -> None:
    """A run that rises to the end has no turn, with or without noise."""
    rng = random.Random(seed)
    values = [index + length * rng.gauss(0, sd) / 10 for index in range(length)]
    assert find_change_point(build_scores(values)) is None


@FEW_EXAMPLES
@given(
    drawn=st.lists(round_values, min_size=MIN_SCORES, max_size=30),
    exponent=st.integers(-40, 40),
    stride=st.integers(1, 9),
)
def test_turn_is_invariant_to_units(drawn: list[float], exponent: int, stride: int) -> None:
    """Scores in another unit have their turn at the same eval."""
    plain = find_change_point(build_scores(drawn))
    scaled = find_change_point(build_scores([math.ldexp(value, exponent) for value in drawn], stride))
    if plain is None:
        assert scaled is None
    else:
        assert scaled == ChangePoint(stride * plain.step, stride * plain.low_step, stride * plain.high_step)


@FEW_EXAMPLES
@given(st.lists(values, max_size=20), st.sets(st.integers(0, 40)))
def test_nan_is_ignored(drawn: list[float], indices: set[int]) -> None:
    """NaN between the scores does not change the turn."""
    clean = [Score(2 * index, value) for index, value in enumerate(drawn)]
    mixed = sorted([*clean, *(Score(2 * index + 1, math.nan) for index in indices)], key=lambda score: score.step)
    assert find_change_point(mixed) == find_change_point(clean)


def search_all_lines(values: Floats, penalty: float) -> Places:
    """The indices of the knots of a continuous line: of all lines through values, the first and the last among them,
    the one whose squared misfit plus `penalty` for each piece is least.

    A reference for `find_knots`, from a table of all pieces; a piece spans three evals or more, the first one two.
    """
    # 1. The squared misfit of the piece from each value, one in a row, to each later one.
    rises, runs = (np.triu(axis - axis[:, None]) for axis in (values, np.arange(len(values), dtype=np.float64)))
    slopes = np.divide(rises, runs, out=np.zeros_like(rises), where=runs > 0)
    products, squares = np.cumsum(rises * runs, axis=1), np.cumsum(runs * runs, axis=1)
    misfits = np.cumsum(rises * rises, axis=1) - slopes * (2 * products - slopes * squares)
    # 2. The least cost up to each value, and the knot before it.
    costs = np.full(len(values), math.inf)
    costs[0] = 0.0
    before = np.zeros(len(values), dtype=np.int64)
    for end in range(2, len(values)):
        candidates = costs[: max(end - 2, 1)] + misfits[: max(end - 2, 1), end]
        before[end] = candidates.argmin()
        costs[end] = candidates[before[end]] + penalty
    # 3. Back from the last value.
    knots = [len(values) - 1]
    while knots[-1]:
        knots.append(int(before[knots[-1]]))
    return np.array(knots[::-1])


@settings(max_examples=100)
@given(st.lists(st.integers(-9, 9), min_size=3, max_size=40), st.sampled_from([1.0, 30.0, 200.0]))
def test_knots_are_the_cheapest(drawn: list[int], penalty: float) -> None:
    """No line through values of at most 16 pieces, each three evals long or more, costs less."""
    values = np.array(drawn, dtype=np.float64)
    assert measure_cost(values, find_knots(values, penalty), penalty) == pytest.approx(
        measure_cost(values, search_all_lines(values, penalty), penalty)
    )


def measure_cost(values: Floats, knots: Places, penalty: float) -> float:
    """The squared misfit of the line through the values at these knots, and the penalty for each piece."""
    line = np.interp(range(len(values)), knots, values[knots])
    return float(np.sum((values - line) ** 2)) + penalty * (len(knots) - 1)


def test_turn_in_a_long_run_is_found() -> None:
    """In a run of 20,000 evals, which is averaged in blocks, the turn is found within 1,000 evals."""
    turn = find_change_point(build_scores(create_hill(20_000, 9_000, 0.2)))
    assert turn is not None
    assert abs(turn.step - 9_000) < 1_000


WITHOUT_RUPTURES = """
import sys
sys.modules["ruptures"] = None
from evalstop_detectors import Score
from evalstop_service.evaluation.change_point import find_change_point
print(find_change_point([Score(step, -abs(step - 20)) for step in range(40)]))
"""


@pytest.mark.nightly
def test_without_ruptures_there_is_no_change_point() -> None:
    """Where ruptures is not installed, the service works and finds no change point in hindsight."""
    completed = subprocess.run([sys.executable, "-c", WITHOUT_RUPTURES], capture_output=True, text=True, timeout=120)
    assert (completed.stdout, completed.stderr) == ("None\n", "")
