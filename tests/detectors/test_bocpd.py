"""bocpd: the pruned recursion equals the direct computation over all run lengths, and locates a fall."""

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

from tests.detectors.evidence import collect_values
from tests.detectors.strategies import eval_series

WITHOUT_LIMIT = Bocpd(run_lengths=1000)

scores = st.lists(st.floats(-20, 20).map(lambda x: round(x, 2)), min_size=8, max_size=30)
detectors = st.builds(
    Bocpd,
    level_evals=st.sampled_from([2.0, 20.0, 100.0]),
    least_evals=st.integers(1, 4),
    margin_sigmas=st.sampled_from([0.0, 1.0]),
    spread_sigmas=st.sampled_from([3.0, 10.0]),
    run_lengths=st.just(1000),
)


def run_detector(detector: Bocpd, values: Sequence[float]) -> tuple[BocpdState, Evidence]:
    """The state and the evidence after the last value."""
    state, evidence = detector.start(), Evidence(Kind.POSTERIOR, 0.0)
    for item in eval_series(values):
        state, evidence = detector.step(state, item)
    return state, evidence


def normalize(values: Sequence[float]) -> list[float] | None:
    """Values relative to the mean of the first 8, in units of their noise; None if the noise is 0."""
    noise = NoiseState()
    for value in values[:8]:
        noise = advance(noise, value)
    sd = estimate(noise).sd
    return [(value - sum(values[:8]) / 8) / sd for value in values] if sd else None


class Level:
    """The Normal-Gamma posterior of a level, computed from all its values at once."""

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

    def predict_density(self, value: float) -> float:
        scale = math.sqrt(self.beta * (self.kappa + 1) / (self.alpha * self.kappa))
        return float(stats.t.pdf(value, 2 * self.alpha, self.mean, scale))

    def probability_below(self, level: float) -> float:
        scale = math.sqrt(self.beta / (self.alpha * self.kappa))
        return float(stats.t.cdf(level, 2 * self.alpha, self.mean, scale))


def compute_directly(detector: Bocpd, values: Sequence[float]) -> tuple[dict[int, float], float]:
    """Without pruning: the probability of each run length, by the index of its first value, and the evidence."""
    hazard = 1 / detector.level_evals
    probabilities: dict[int, float] = {0: 1.0}
    best_levels: dict[int, float | None] = {0: None}
    lower: dict[int, float] = {0: 0.0}
    evidence = 0.0
    for now, value in enumerate(values):
        joint = {
            first: mass * Level(detector, values[first:now]).predict_density(value)
            for first, mass in probabilities.items()
        }
        total = sum(joint.values())
        new_best, evidence = 0.0, 0.0
        for first, mass in joint.items():
            level, known = Level(detector, values[first : now + 1]), best_levels[first]
            is_long = now + 1 - first >= detector.least_evals
            if known is None:
                top, now_lower = level.mean, 0.0 if is_long else lower[first]
            else:
                top = max(known, level.mean) if is_long else known
                now_lower = level.probability_below(known - detector.margin_sigmas) if is_long else lower[first]
            new_best += mass / total * top
            evidence += mass / total * now_lower
        probabilities = {first: mass / total * (1 - hazard) for first, mass in joint.items()} | {now + 1: hazard}
        best_levels[now + 1], lower[now + 1] = new_best, evidence
    return probabilities, evidence


@given(detector=detectors, values=scores)
def test_recursion_equals_direct_computation(detector: Bocpd, values: list[float]) -> None:
    """Run length probabilities and evidence equal those of the computation without pruning."""
    units = normalize(values)
    state, evidence = run_detector(detector, values)
    if units is None:
        return
    probabilities, expected = compute_directly(detector, units)
    kept_probabilities = {len(values) - item.evals: item.probability for item in state.run_lengths}
    assert kept_probabilities == pytest.approx(
        {first: probabilities[first] for first in kept_probabilities}, rel=1e-4, abs=1e-7
    )
    # A run length that was dropped at 1e-9 could have become likely again.
    assert sum(probabilities.values()) - sum(probabilities[first] for first in kept_probabilities) < 1e-4
    assert evidence.value == pytest.approx(expected, abs=3e-3)


@given(detector=detectors, values=scores)
def test_probabilities_sum_to_one(detector: Bocpd, values: list[float]) -> None:
    """The probabilities of the kept run lengths sum to 1, also after pruning."""
    few = msgspec.structs.replace(detector, run_lengths=4)
    for item in (detector, few):
        state, _ = run_detector(item, values)
        assert len(state.run_lengths) <= item.run_lengths
        assert not state.unit or sum(each.probability for each in state.run_lengths) == pytest.approx(1)


def test_32_run_lengths_suffice() -> None:
    """With at most 32 run lengths, the evidence differs by at most 0.03 from that without a limit."""
    for seed in range(6):
        rng = random.Random(seed)
        values = [rng.gauss(0, 1) - (0.8 * seed if index > 60 else 0) for index in range(120)]
        limited, full = (collect_values(detector, eval_series(values)) for detector in (Bocpd(), WITHOUT_LIMIT))
        assert limited == pytest.approx(full, abs=0.03)


def test_fall_is_found_and_placed() -> None:
    """Ten evals after a fall by 4 sd the probability is above 0.9 and the turn near; noise alone is not suspect."""
    for seed in range(10):
        rng = random.Random(seed)
        noise = [rng.gauss(0, 1) for _ in range(110)]
        _, evidence = run_detector(Bocpd(), [value - (4 if index >= 100 else 0) for index, value in enumerate(noise)])
        assert evidence.value > 0.9
        assert evidence.turn_step is not None
        assert 97 <= evidence.turn_step <= 102
        _, flat = run_detector(Bocpd(), noise)
        assert not flat.reaches(Bocpd().thresholds.suspect_at)


def test_rise_is_no_evidence() -> None:
    """Upward steps give a probability below 0.01."""
    rng = random.Random(0)
    _, evidence = run_detector(Bocpd(), [index // 40 * 5 + rng.gauss(0, 1) for index in range(200)])
    assert evidence.value < 0.01


def test_best_level_is_remembered() -> None:
    """After a fall and a partial rise the probability stays high; back at the best level it is below 0.5."""
    rng = random.Random(0)
    levels = [10.0] * 40 + [0.0] * 20 + [4.0] * 20
    assert run_detector(Bocpd(), [level + rng.gauss(0, 1) for level in levels])[1].value > 0.99
    assert run_detector(Bocpd(), [level + rng.gauss(0, 1) for level in [*levels, *[10.0] * 20]])[1].value < 0.5


def test_single_high_eval_sets_no_best_level() -> None:
    """An outlier upward does not count as a level that was lost later."""
    rng = random.Random(4)
    values = [rng.gauss(0, 1) for _ in range(80)]
    values[40] = 15.0
    assert run_detector(Bocpd(), values)[1].value < 0.1


def test_note_explains_a_missing_value() -> None:
    """Until the noise is known, the note says why there is no value."""
    notes = [run_detector(Bocpd(), [1.0] * count)[1].note for count in (1, 8)]
    assert notes == ["needs 7 more evals", "the eval score has not moved yet"]
    assert run_detector(Bocpd(), [1.0] * 20 + [2.0])[1].note.startswith(
        "probability that the eval score's level has fallen"
    )
