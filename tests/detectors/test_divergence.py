"""Proxy against the eval score: it alarms when one rises while the other falls, and on neither alone."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from evalstop_detectors import Evidence, MetricRole, Observation
from evalstop_detectors.detectors.divergence import Divergence, DivergenceState, _regression
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import eval_series, series

UP = [index / 60 for index in range(121)]
HUMP = [1 - abs(index - 60) / 60 for index in range(121)]
FLAT = [0.0] * 121


def run(
    eval_scores: list[float],
    proxy: list[float],
    sd: float = 0.05,
    *,
    seed: int = 0,
    common: float = 0.0,
    control_variate: bool = True,
) -> list[Evidence]:
    """The evidence after each eval; `common` is the correlation of the eval score's noise with the proxy's."""
    chance, detector = random.Random(seed), Divergence(control_variate=control_variate)
    state, found = detector.start(), []
    for index, (mine, theirs) in enumerate(zip(eval_scores, proxy, strict=True)):
        luck = chance.gauss(0, 1)
        own = common * luck + math.sqrt(1 - common**2) * chance.gauss(0, 1)
        state, _ = detector.step(state, Observation(MetricRole.PROXY, index, theirs + sd * luck))
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, mine + sd * own))
        found.append(evidence)
    return found


def highest(evidence: list[Evidence]) -> float:
    return max(item.value for item in evidence)


def test_a_proxy_that_rises_while_the_eval_score_falls_alarms() -> None:
    """Past the peak of the eval score under a rising proxy it calls for a stop, and places the turn near the peak."""
    evidence = run(HUMP, UP)
    stops = [item for item in evidence if item.reaches(Divergence().thresholds.stop_at)]
    assert stops
    assert highest(evidence[:62]) < 4
    assert stops[-1].turn_step is not None
    assert abs(stops[-1].turn_step - 60) <= 12
    assert "while the proxy did not" in stops[-1].note


@pytest.mark.parametrize(
    ("eval_scores", "proxy"), [(UP, UP), (UP, FLAT), (FLAT, UP), (FLAT, FLAT), (HUMP, HUMP), (UP, UP[::-1])]
)
def test_without_a_fall_of_the_eval_score_alone_there_is_no_alarm(eval_scores: list[float], proxy: list[float]) -> None:
    """A proxy that rises beside steady the eval score, and the eval score that falls with its proxy, stay below the
    threshold."""
    for seed in range(5):
        assert highest(run(eval_scores, proxy, seed=seed)) < 4


def test_the_eval_score_decides() -> None:
    """A proxy alone is no evidence, whatever it does, and neither is the eval score without a proxy."""
    detector = Divergence()
    for role in (MetricRole.PROXY, MetricRole.EVAL):
        state = detector.start()
        for index in range(50):
            state, evidence = detector.step(state, Observation(role, index, float(-index)))
            assert evidence.value == 0
            assert evidence.note == "waits for an eval and a proxy before it"


def test_luck_in_common_is_taken_off_the_eval_score() -> None:
    """Where noise is large and shared with the proxy the evidence grows, and the note says how much is spared."""
    plain, spared = (
        [run(HUMP, UP, 0.3, seed=seed, common=0.9, control_variate=on)[-1] for seed in range(20)]
        for on in (False, True)
    )
    assert sum(item.value for item in spared) > 1.1 * sum(item.value for item in plain)
    assert any("of the eval score's noise" in item.note for item in spared)
    assert not any("of the eval score's noise" in item.note for item in plain)


def test_luck_of_their_own_is_left_alone() -> None:
    """Where the noises have nothing in common, the proxy takes next to nothing off the eval score."""
    plain, spared = (
        [run(HUMP, UP, 0.3, seed=seed, control_variate=on)[-1].value for seed in range(20)] for on in (False, True)
    )
    assert sum(spared) == pytest.approx(sum(plain), rel=0.15)


@given(squares=st.floats(0, 1e300), own=st.floats(0, 1e300), correlation=st.floats(-1, 1), count=st.floats(0, 50))
def test_the_regression_is_shrunk(squares: float, own: float, correlation: float, count: float) -> None:
    """The coefficient is never larger than least squares would have it, and explains a share between 0 and 1."""
    products = correlation * math.sqrt(squares) * math.sqrt(own)
    coefficient, explained = _regression((count, squares, products, own))
    assert 0 <= explained <= 1
    assert math.isfinite(coefficient)
    assert coefficient == 0 or abs(coefficient) <= abs(products / squares)


def test_long_runs_are_kept_in_blocks() -> None:
    """A slow turn over 3,000 evals is found, and the state stays as small as after a few hundred."""
    n, detector, chance = 3000, Divergence(), random.Random(0)
    state, sizes, evidence = detector.start(), [], None
    for index in range(n):
        proxy = Observation(MetricRole.PROXY, index, index / n + chance.gauss(0, 0.2))
        state, _ = detector.step(state, proxy)
        eval_scores = 1 - abs(index - n / 2) / n + chance.gauss(0, 0.2)
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, eval_scores))
        sizes.append(len(msgspec.json.encode(state)))
    assert evidence is not None
    assert evidence.value > 8
    assert evidence.turn_step is not None
    assert abs(evidence.turn_step - n / 2) < n / 4
    assert max(sizes) < 20_000
    assert msgspec.json.decode(msgspec.json.encode(state), type=DivergenceState) == state


@given(observations=series({MetricRole.PROXY, MetricRole.EVAL}, max_size=30), shift=st.integers(-100, 100))
def test_proxy_and_the_eval_score_have_units_of_their_own(observations: list[Observation], shift: int) -> None:
    """A proxy in another unit, a power of two, leaves the evidence as it is."""
    detector = Divergence(least_evals=2)
    plain = scaled = detector.start()
    for item in observations:
        if math.isfinite(item.value) and abs(item.value) > 1e30:
            continue
        plain, expected = detector.step(plain, item)
        other = (
            msgspec.structs.replace(item, value=math.ldexp(item.value, 7)) if item.role is MetricRole.PROXY else item
        )
        scaled, found = detector.step(scaled, other)
        assert (found.value, found.turn_step) == pytest.approx((expected.value, expected.turn_step))


def test_a_short_run_says_what_is_missing() -> None:
    """Before enough evals with a proxy the note counts those that are missing."""
    detector = Divergence()
    state, _ = detector.step(detector.start(), Observation(MetricRole.PROXY, 0, 1.0))
    for index, observation in enumerate(eval_series([3.0, 2.0, 1.0])):
        state, evidence = detector.step(state, observation)
        assert evidence.note == f"needs {5 - index} more eval{'s' * (index < 4)}, each with a proxy before it"
