"""The pruned recursion is the direct computation over all run lengths, and says where the level fell."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from evalstop_detectors import Evidence, Kind
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.bocpd import Bocpd, BocpdState
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.detectors.strategies import eval_series

scores = st.lists(st.floats(-20, 20).map(lambda x: round(x, 2)), min_size=8, max_size=30)
detectors = st.builds(
    Bocpd,
    level_evals=st.sampled_from([2.0, 20.0, 100.0]),
    least_evals=st.integers(1, 4),
    margin_sigmas=st.sampled_from([0.0, 1.0]),
    spread_sigmas=st.sampled_from([3.0, 10.0]),
    run_lengths=st.just(1000),
)


def fold(detector: Bocpd, values: Sequence[float]) -> tuple[BocpdState, Evidence]:
    state, evidence = detector.start(), Evidence(Kind.POSTERIOR, 0.0)
    for item in eval_series(values):
        state, evidence = detector.step(state, item)
    return state, evidence


def in_units(values: Sequence[float]) -> list[float] | None:
    """Counted from the mean of the first 8 in units of their noise; None: they do not move."""
    noise = NoiseState()
    for value in values[:8]:
        noise = advance(noise, value)
    sd = estimate(noise).sd
    return [(value - sum(values[:8]) / 8) / sd for value in values] if sd else None


class Level:
    """What the values of one level say of it: a Normal-Gamma posterior, from all of them at once."""

    def __init__(self, detector: Bocpd, values: Sequence[float]) -> None:
        prior = detector.spread_sigmas**-2
        count, total = len(values), sum(values)
        self.kappa, self.alpha = prior + count, 1 + count / 2
        self.mean = total / self.kappa
        self.beta = 1.0
        if count:
            average = total / count
            spread = sum((value - average) ** 2 for value in values)
            self.beta += spread / 2 + prior * count * average**2 / (2 * self.kappa)

    def density(self, value: float) -> float:
        scale = math.sqrt(self.beta * (self.kappa + 1) / (self.alpha * self.kappa))
        return float(stats.t.pdf(value, 2 * self.alpha, self.mean, scale))

    def below(self, level: float) -> float:
        scale = math.sqrt(self.beta / (self.alpha * self.kappa))
        return float(stats.t.cdf(level, 2 * self.alpha, self.mean, scale))


def directly(detector: Bocpd, values: Sequence[float]) -> tuple[dict[int, float], float]:
    """The probability of every run length, by the index of its first value, and the evidence: nothing pruned."""
    hazard = 1 / detector.level_evals
    begins: dict[int, float] = {0: 1.0}
    best: dict[int, float | None] = {0: None}
    lower: dict[int, float] = {0: 0.0}
    evidence = 0.0
    for now, value in enumerate(values):
        joint = {first: mass * Level(detector, values[first:now]).density(value) for first, mass in begins.items()}
        total = sum(joint.values())
        new_best, evidence = 0.0, 0.0
        for first, mass in joint.items():
            level, known = Level(detector, values[first : now + 1]), best[first]
            own = now + 1 - first >= detector.least_evals
            if known is None:
                top, now_lower = level.mean, 0.0 if own else lower[first]
            else:
                top = max(known, level.mean) if own else known
                now_lower = level.below(known - detector.margin_sigmas) if own else lower[first]
            new_best += mass / total * top
            evidence += mass / total * now_lower
        begins = {first: mass / total * (1 - hazard) for first, mass in joint.items()} | {now + 1: hazard}
        best[now + 1], lower[now + 1] = new_best, evidence
    return begins, evidence


@given(detector=detectors, values=scores)
def test_it_is_the_direct_computation(detector: Bocpd, values: list[float]) -> None:
    """The probabilities of all run lengths and the evidence are those of an unpruned computation from the values."""
    units = in_units(values)
    state, evidence = fold(detector, values)
    if units is None:
        return
    begins, expected = directly(detector, units)
    found = {len(values) - item.evals: item.probability for item in state.run_lengths}
    assert found == pytest.approx({first: begins[first] for first in found}, rel=1e-4, abs=1e-7)
    # A run length that was dropped at 1e-9 may grow again by what comes later.
    assert sum(begins.values()) - sum(begins[first] for first in found) < 1e-4
    assert evidence.value == pytest.approx(expected, abs=3e-3)


@given(detector=detectors, values=scores)
def test_probabilities_sum_to_one(detector: Bocpd, values: list[float]) -> None:
    """After pruning too the run lengths hold all the probability there is."""
    few = msgspec.structs.replace(detector, run_lengths=4)
    for item in (detector, few):
        state, _ = fold(item, values)
        assert len(state.run_lengths) <= item.run_lengths
        assert not state.unit or sum(each.probability for each in state.run_lengths) == pytest.approx(1)


def test_32_run_lengths_are_as_good_as_all() -> None:
    """On noisy runs with and without a fall the cap moves the evidence by a few hundredths at most."""
    for seed in range(6):
        chance = random.Random(seed)
        values = [chance.gauss(0, 1) - (0.8 * seed if index > 60 else 0) for index in range(120)]
        state, whole = Bocpd().start(), Bocpd(run_lengths=1000)
        other = whole.start()
        for item in eval_series(values):
            state, ours = Bocpd().step(state, item)
            other, theirs = whole.step(other, item)
            assert ours.value == pytest.approx(theirs.value, abs=0.03)


def test_it_places_a_fall() -> None:
    """A fall by 4 standard deviations is all but certain after ten evals, and placed; noise alone is not suspect."""
    for seed in range(10):
        chance = random.Random(seed)
        noise = [chance.gauss(0, 1) for _ in range(110)]
        _, found = fold(Bocpd(), [value - (4 if index >= 100 else 0) for index, value in enumerate(noise)])
        assert found.value > 0.9
        assert found.turn_step is not None
        assert 97 <= found.turn_step <= 102
        _, flat = fold(Bocpd(), noise)
        assert not flat.reaches(Bocpd().thresholds.suspect_at)


def test_a_rise_is_a_change_but_no_evidence() -> None:
    """Steps upward are levels that change and do not fall."""
    chance = random.Random(0)
    _, found = fold(Bocpd(), [index // 40 * 5 + chance.gauss(0, 1) for index in range(200)])
    assert found.value < 0.01


def test_the_best_level_is_remembered_over_levels_between() -> None:
    """After two falls and a rise in part, the eval score is still below its best."""
    chance = random.Random(0)
    levels = [10.0] * 40 + [0.0] * 20 + [4.0] * 20
    assert fold(Bocpd(), [level + chance.gauss(0, 1) for level in levels])[1].value > 0.99
    assert fold(Bocpd(), [level + chance.gauss(0, 1) for level in [*levels, *[10.0] * 20]])[1].value < 0.5


def test_one_high_eval_is_no_best_level() -> None:
    """A level of one eval sets no standard for those to come."""
    chance = random.Random(4)
    values = [chance.gauss(0, 1) for _ in range(80)]
    values[40] = 15.0
    assert fold(Bocpd(), values)[1].value < 0.1


def test_the_notes_say_what_is_missing() -> None:
    """Before there is a unit the note says why there is no number."""
    notes = [fold(Bocpd(), [1.0] * count)[1].note for count in (1, 8)]
    assert notes == ["needs 7 more evals", "the eval score has not moved yet"]
    assert fold(Bocpd(), [1.0] * 20 + [2.0])[1].note.startswith("probability that the eval score's level has fallen")


def test_its_state_stays_small() -> None:
    """Its state does not grow with the run."""
    chance = random.Random(1)
    state, largest = Bocpd().start(), 0
    for item in eval_series([chance.gauss(0, 1) for _ in range(3000)]):
        state, _ = Bocpd().step(state, item)
        largest = max(largest, len(msgspec.json.encode(state)))
    assert largest < 8000
