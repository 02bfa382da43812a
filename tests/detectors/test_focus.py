"""The pruned likelihood ratio is that over all change points, and a rise begins the series anew."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from evalstop_detectors import Evidence
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.focus import Focus
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.detectors.strategies import eval_series

scores = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-100, 100).map(lambda x: round(x, 3))), max_size=60
)

FORGETTING = Focus(rise_sigmas=4.0)


def evidence_of(detector: Focus, values: Sequence[float]) -> list[Evidence]:
    state, found = detector.start(), []
    for observation in eval_series(values):
        state, evidence = detector.step(state, observation)
        found.append(evidence)
    return found


def ratios(detector: Focus, values: Sequence[float]) -> list[float]:
    return [item.value for item in evidence_of(detector, values)]


def change(values: Sequence[float], before: int) -> float:
    """The fall of the mean after so many values, in units of one value's noise."""
    after = len(values) - before
    fall = sum(values[:before]) / before - sum(values[before:]) / after
    return fall * math.sqrt(before * after / len(values))


def over_all_change_points(detector: Focus, values: Sequence[float]) -> list[float]:
    """The ratio by brute force, with the series begun anew where it rose."""
    found, begins, noise = [], 0, NoiseState()
    for end in range(1, len(values) + 1):
        known = estimate(noise)
        sd = known.sd * known.inflation
        noise = advance(noise, values[end - 1])
        series = values[begins:end]
        changes = [change(series, before) for before in range(1, len(series))]
        if end < 4 or sd == 0:
            found.append(0.0)
            continue
        found.append(max([0.0, *changes]) ** 2 / sd**2 / 2)
        if detector.rise_sigmas is not None and changes:
            rise = -min(changes) / sd
            # At the edge the sums decide in another order of additions.
            assume(abs(rise - detector.rise_sigmas) > 1e-6)
            assume(sum(abs(item - min(changes)) < 1e-6 for item in changes) == 1 or rise < detector.rise_sigmas)
            if rise >= detector.rise_sigmas:
                begins = max(begins + 1 + changes.index(min(changes)), end - 64)
                found[-1] = 0.0
    return found


@given(values=scores)
def test_it_is_the_ratio_over_all_change_points(values: list[float]) -> None:
    """After every eval the plain statistic is the largest over all change points, though it looks at a few."""
    detector = Focus(rise_sigmas=None, candidates=128)
    expected = over_all_change_points(detector, values)
    assert ratios(detector, values) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(values=scores, sigmas=st.sampled_from([0.5, 1.5, 4.0]))
def test_a_rise_begins_the_series_anew(values: list[float], sigmas: float) -> None:
    """It is the ratio over the change points since the last significant rise."""
    detector = Focus(rise_sigmas=sigmas, candidates=128)
    expected = over_all_change_points(detector, values)
    assert ratios(detector, values) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(values=scores, candidates=st.integers(4, 8))
def test_fewer_candidates_find_no_more(values: list[float], candidates: int) -> None:
    """A cap on the change points makes the statistic smaller or leaves it."""
    capped = ratios(Focus(rise_sigmas=None, candidates=candidates), values)
    whole = ratios(Focus(rise_sigmas=None, candidates=128), values)
    assert all(ours <= theirs * (1 + 1e-9) for ours, theirs in zip(capped, whole, strict=True))


def test_the_cap_costs_little_on_a_steady_fall() -> None:
    """Where every eval is a change point that could win, 32 of them keep the statistic within 1 %."""
    chance = random.Random(3)
    values = [-0.01 * index**1.2 + chance.gauss(0, 0.001) for index in range(400)]
    capped = Focus(rise_sigmas=None, candidates=32)
    whole = over_all_change_points(capped, values)
    state = capped.start()
    for item in eval_series(values):
        state, evidence = capped.step(state, item)
    assert len(state.upper) == 32
    assert 0.99 * whole[-1] <= evidence.value <= whole[-1] * (1 + 1e-9)


def test_hulls_stay_small_on_noise() -> None:
    """Of ten thousand noisy evals a handful can still be the best change point; the state is bounded."""
    chance = random.Random(2)
    detector, state, most = Focus(rise_sigmas=None, candidates=128), Focus().start(), 0
    for item in eval_series([chance.gauss(0, 1) for _ in range(10_000)]):
        state, _ = detector.step(state, item)
        most = max(most, len(state.upper))
    assert most < 40
    assert len(msgspec.json.encode(state)) < 6000


def test_it_places_a_fall() -> None:
    """The turn is the last eval before the change, of a fall from a level that was itself risen to."""
    levels = [0.0] * 50 + [8.0] * 50 + [3.0] * 50
    for seed in range(10):
        chance = random.Random(seed)
        last = evidence_of(FORGETTING, [level + chance.gauss(0, 1) for level in levels])[-1]
        assert last.reaches(FORGETTING.thresholds.stop_at)
        assert last.turn_step is not None
        assert 95 <= last.turn_step <= 103


def test_it_places_a_fall_after_a_rise_exactly() -> None:
    """Also in a series begun anew the turn is a step of the run."""
    values = [0.0, 0.1] * 40 + [10.0, 10.1] * 20 + [6.0, 6.1] * 10
    assert evidence_of(FORGETTING, values)[-1].turn_step == 119


def test_what_was_gained_hides_a_loss_from_the_plain_method() -> None:
    """The plain ratio sees no lower mean than before while a run lies between its start and its best."""
    values = [0.0, 0.1] * 20 + [10.0, 10.1] * 10 + [6.0, 6.1] * 10
    assert evidence_of(FORGETTING, values)[-1].value > 10 * evidence_of(Focus(), values)[-1].value


def test_a_dip_that_has_recovered_is_forgotten() -> None:
    """Back on its old level a run has no evidence against it."""
    values = [0.0, 0.1] * 20 + [-3.0, -3.1] * 10
    assert evidence_of(FORGETTING, values)[-1].reaches(FORGETTING.thresholds.stop_at)
    assert not evidence_of(FORGETTING, [*values, *[0.0, 0.1] * 10])[-1].reaches(FORGETTING.thresholds.suspect_at)


@pytest.mark.parametrize("detector", [Focus(), FORGETTING])
def test_noise_alone_is_not_suspect(detector: Focus) -> None:
    """Plateaus of 300 noisy evals stay below the threshold to suspect."""
    found = [max(ratios(detector, noise(seed, 300))) for seed in range(20)]
    assert max(found) < (detector.thresholds.suspect_at or 0)


def noise(seed: int, count: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(0, 1) for _ in range(count)]


def test_the_notes_say_what_is_missing() -> None:
    """Before anything is known the note says why there is no number."""
    found = evidence_of(Focus(), [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 5.0])
    assert [item.note for item in found[:1]] == ["needs 3 more evals"]
    assert found[4].note == "the eval score has not moved yet"
