"""The turn with hindsight: placed on hills, absent on slopes, and never an exception."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from evalstop_detectors.checkpoint.change_point import FEWEST, ChangePoint, locate_change_point
from evalstop_detectors.checkpoint.choice import Score
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detectors.strategies import round_values, values

FEW = settings(max_examples=40)


def scores(values: list[float], stride: int = 1) -> list[Score]:
    return [Score(stride * index, value) for index, value in enumerate(values)]


def hill(length: int, peak: int, sd: float = 0.0, seed: int = 0, plateau: int = 0) -> list[float]:
    """Up to 1 at `peak`, flat for `plateau` more evals, and down at the same pace."""
    chance = random.Random(seed)
    clean = [1 - max(peak - i, i - peak - plateau, 0) / max(peak, length - 1 - peak) for i in range(length)]
    return [value + chance.gauss(0, sd) for value in clean]


@FEW
@given(length=st.integers(12, 300), share=st.floats(0.2, 0.8))
def test_a_clean_turn_is_found(length: int, share: float) -> None:
    """Of two straight lines without noise, the turn lies within a block of where they meet."""
    peak = round(share * (length - 1))
    found = locate_change_point(scores(hill(length, peak)))
    assert found is not None
    assert abs(found.step - peak) <= 2 + length // 100
    assert found.low_step <= found.step <= found.high_step


@pytest.mark.parametrize("length", [30, 100, 1000])
def test_a_noisy_turn_is_found(length: int) -> None:
    """With noise of a tenth of the gain the turn is placed within a tenth of the run, in most of 20 runs."""
    peak = length // 2
    found = [locate_change_point(scores(hill(length, peak, 0.1, seed))) for seed in range(20)]
    near = [item for item in found if item is not None and abs(item.step - peak) <= 0.1 * length]
    held = [item for item in found if item is not None and item.low_step <= peak <= item.high_step]
    assert len(near) >= 18
    assert len(held) >= 16


def test_a_plateau_turns_where_it_ends() -> None:
    """Of a rise, a plateau and a fall, the turn is the end of the plateau."""
    found = locate_change_point(scores(hill(90, 20, 0.02, plateau=40)))
    assert found is not None
    assert abs(found.step - 60) <= 6


def test_a_fall_from_the_first_eval_turns_there() -> None:
    """A run that never rose turned at its first eval, with no gain."""
    found = locate_change_point(scores([-0.1 * index for index in range(30)]))
    assert found is not None
    assert (found.step, found.gain) == (0, 0.0)
    assert found.drop == pytest.approx(2.9)


@FEW
@given(length=st.integers(0, 60), sd=st.sampled_from([0.0, 0.01, 0.1]), seed=st.integers(0, 50))
def test_a_rise_has_no_turn(length: int, sd: float, seed: int) -> None:
    """A run whose eval score rises to the end has none, with and without noise."""
    chance = random.Random(seed)
    assert locate_change_point(scores([index + length * chance.gauss(0, sd) / 10 for index in range(length)])) is None


@FEW
@given(value=st.sampled_from([0.0, 1.0, -3.5, 1e300, 5e-324]), length=st.integers(0, 40))
def test_a_constant_run_has_no_turn(value: float, length: int) -> None:
    """Nothing turns where nothing moves."""
    assert locate_change_point(scores([value] * length)) is None


@FEW
@given(st.lists(values, max_size=30), st.integers(1, 10**6))
def test_whatever_arrives_the_turn_is_a_step_seen(drawn: list[float], stride: int) -> None:
    """Absurd scores raise nothing; the steps of a turn are steps of finite scores, and its figures are finite."""
    found = locate_change_point(scores(drawn, stride))
    if found is not None:
        seen = {stride * index for index, value in enumerate(drawn) if math.isfinite(value)}
        assert {found.step, found.low_step, found.high_step} <= seen
        assert found.low_step <= found.step <= found.high_step
        assert math.isfinite(found.gain)
        assert 0 < found.drop < math.inf
        assert msgspec.json.decode(msgspec.json.encode(found), type=ChangePoint) == found


@FEW
@given(
    drawn=st.lists(round_values, min_size=FEWEST, max_size=30), exponent=st.integers(-40, 40), stride=st.integers(1, 9)
)
def test_the_turn_knows_no_unit(drawn: list[float], exponent: int, stride: int) -> None:
    """Scores in another unit turn at the same step, with gain and drop in that unit; steps only name the evals."""
    plain = locate_change_point(scores(drawn))
    scaled = locate_change_point(scores([math.ldexp(value, exponent) for value in drawn], stride))
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


@FEW
@given(st.lists(values, max_size=20), st.sets(st.integers(0, 40)))
def test_values_that_are_no_numbers_are_passed_over(drawn: list[float], places: set[int]) -> None:
    """NaN between the scores changes nothing."""
    clean = [Score(2 * index, value) for index, value in enumerate(drawn)]
    mixed = sorted([*clean, *(Score(2 * place + 1, math.nan) for place in places)], key=lambda score: score.step)
    assert locate_change_point(mixed) == locate_change_point(clean)


def test_long_runs_are_thinned() -> None:
    """Of 20,000 evals the turn is found within a few blocks of them."""
    found = locate_change_point(scores(hill(20_000, 9_000, 0.2)))
    assert found is not None
    assert abs(found.step - 9_000) < 1_000
