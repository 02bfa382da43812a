"""focus: the pruned likelihood ratio equals that over all change points; a rise restarts the series."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.focus import Focus
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.detectors.evidence import collect_evidence, collect_values
from tests.detectors.strategies import eval_series

scores = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-100, 100).map(lambda x: round(x, 3))), max_size=60
)

RESTARTING = Focus(rise_sigmas=4.0)


def mean_fall(values: Sequence[float], before: int) -> float:
    """The fall of the mean after `before` values, scaled to the variance of one value."""
    after = len(values) - before
    fall = sum(values[:before]) / before - sum(values[before:]) / after
    return fall * math.sqrt(before * after / len(values))


def compute_over_all_change_points(detector: Focus, values: Sequence[float]) -> list[float]:
    """The likelihood ratio by brute force, restarting the series at significant rises."""
    ratios, first, noise = [], 0, NoiseState()
    for end in range(1, len(values) + 1):
        known = estimate(noise)
        sd = known.sd * known.inflation
        noise = advance(noise, values[end - 1])
        series = values[first:end]
        changes = [mean_fall(series, before) for before in range(1, len(series))]
        if end < 4 or sd == 0:
            ratios.append(0.0)
            continue
        ratios.append(max([0.0, *changes]) ** 2 / sd**2 / 2)
        if detector.rise_sigmas is not None and changes:
            rise = -min(changes) / sd
            # Skip ties, where the order of additions decides.
            assume(abs(rise - detector.rise_sigmas) > 1e-6)
            assume(sum(abs(item - min(changes)) < 1e-6 for item in changes) == 1 or rise < detector.rise_sigmas)
            if rise >= detector.rise_sigmas:
                first = max(first + 1 + changes.index(min(changes)), end - 64)
                ratios[-1] = 0.0
    return ratios


@given(values=scores)
def test_ratio_equals_all_change_points(values: list[float]) -> None:
    """After each eval the value equals the maximum over all change points, although only a few are kept."""
    detector = Focus(rise_sigmas=None, candidates=128)
    expected = compute_over_all_change_points(detector, values)
    assert collect_values(detector, eval_series(values)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(values=scores, sigmas=st.sampled_from([0.5, 1.5, 4.0]))
def test_significant_rise_restarts_the_series(values: list[float], sigmas: float) -> None:
    """With `rise_sigmas` the value is the maximum over the change points since the last significant rise."""
    detector = Focus(rise_sigmas=sigmas, candidates=128)
    expected = compute_over_all_change_points(detector, values)
    assert collect_values(detector, eval_series(values)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(values=scores, candidates=st.integers(4, 8))
def test_fewer_candidates_never_raise_the_value(values: list[float], candidates: int) -> None:
    """With a limit on the candidates the value is at most that without a limit."""
    capped = collect_values(Focus(rise_sigmas=None, candidates=candidates), eval_series(values))
    whole = collect_values(Focus(rise_sigmas=None, candidates=128), eval_series(values))
    assert all(limited <= full * (1 + 1e-9) for limited, full in zip(capped, whole, strict=True))


def test_candidate_limit_costs_at_most_1_percent() -> None:
    """On a steady decline, where every eval is a candidate, 32 candidates give the value within 1 %."""
    rng = random.Random(3)
    values = [-0.01 * index**1.2 + rng.gauss(0, 0.001) for index in range(400)]
    capped = Focus(rise_sigmas=None, candidates=32)
    whole = compute_over_all_change_points(capped, values)
    state = capped.start()
    for item in eval_series(values):
        state, evidence = capped.step(state, item)
    assert len(state.upper) == 32
    assert 0.99 * whole[-1] <= evidence.value <= whole[-1] * (1 + 1e-9)


def test_noise_leaves_few_candidates() -> None:
    """Over 10,000 noisy evals fewer than 40 candidates are kept."""
    rng = random.Random(2)
    detector, state, most_candidates = Focus(rise_sigmas=None, candidates=128), Focus().start(), 0
    for item in eval_series([rng.gauss(0, 1) for _ in range(10_000)]):
        state, _ = detector.step(state, item)
        most_candidates = max(most_candidates, len(state.upper))
    assert most_candidates < 40


def test_turn_is_placed_at_the_fall() -> None:
    """After a rise and a fall the turn is near the last eval before the fall."""
    levels = [0.0] * 50 + [8.0] * 50 + [3.0] * 50
    for seed in range(10):
        rng = random.Random(seed)
        last = collect_evidence(RESTARTING, eval_series([level + rng.gauss(0, 1) for level in levels]))[-1]
        assert last.reaches(RESTARTING.thresholds.stop_at)
        assert last.turn_step is not None
        assert 95 <= last.turn_step <= 103


def test_turn_after_a_rise_is_exact() -> None:
    """After a restart of the series the turn is still a step of the run."""
    values = [0.0, 0.1] * 40 + [10.0, 10.1] * 20 + [6.0, 6.1] * 10
    assert collect_evidence(RESTARTING, eval_series(values))[-1].turn_step == 119


def test_restart_finds_a_loss_above_the_start() -> None:
    """A fall to a level above the start is detected only by the series that restarts at the rise."""
    values = [0.0, 0.1] * 20 + [10.0, 10.1] * 10 + [6.0, 6.1] * 10
    restarting, plain = (collect_values(detector, eval_series(values)) for detector in (RESTARTING, Focus()))
    assert restarting[-1] > 10 * plain[-1]


def test_recovered_dip_is_not_suspect() -> None:
    """After a dip and a return to the old level, the value is below the threshold to suspect."""
    values = [0.0, 0.1] * 20 + [-3.0, -3.1] * 10
    assert collect_evidence(RESTARTING, eval_series(values))[-1].reaches(RESTARTING.thresholds.stop_at)
    recovered = collect_evidence(RESTARTING, eval_series([*values, *[0.0, 0.1] * 10]))
    assert not recovered[-1].reaches(RESTARTING.thresholds.suspect_at)


@pytest.mark.parametrize("detector", [Focus(), RESTARTING])
def test_noise_is_not_suspect(detector: Focus) -> None:
    """20 plateaus of 300 noisy evals stay below the threshold to suspect."""
    highest = [max(collect_values(detector, eval_series(create_noise(seed, 300)))) for seed in range(20)]
    assert max(highest) < (detector.thresholds.suspect_at or 0)


def create_noise(seed: int, count: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0, 1) for _ in range(count)]


def test_note_explains_a_missing_value() -> None:
    """Until there is a value, the note gives the reason."""
    evidence = collect_evidence(Focus(), eval_series([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 5.0]))
    assert [item.note for item in evidence[:1]] == ["needs 3 more evals"]
    assert evidence[4].note == "the eval score has not moved yet"
