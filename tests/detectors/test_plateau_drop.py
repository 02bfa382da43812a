"""The drop from a plateau: equal to its slow definition, alarmed by turns, and not by what only looks like one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from evalstop_detectors import Evidence, MetricRole, Observation
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.plateau_drop import PlateauDrop, PlateauDropState
from evalstop_detectors.policy.calibration import default_thresholds
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.detectors.plateau_drop_reference import slowly
from tests.detectors.strategies import eval_series

Floats = NDArray[np.float64]
STOP_AT = default_thresholds(PlateauDrop()).stop_at or math.nan
SUSPECT_AT = default_thresholds(PlateauDrop()).suspect_at or math.nan
LENGTHS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def run(
    eval_scores: Sequence[float], proxy: Sequence[float] | None = None, detector: PlateauDrop | None = None
) -> list[Evidence]:
    """The evidence after every eval."""
    detector = detector or PlateauDrop()
    state, found = detector.start(), []
    for index, score in enumerate(eval_scores):
        if proxy is not None:
            state, _ = detector.step(state, Observation(MetricRole.PROXY, index, proxy[index]))
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, score))
        found.append(evidence)
    return found


def highest(
    eval_scores: Sequence[float], proxy: Sequence[float] | None = None, detector: PlateauDrop | None = None
) -> float:
    return max(item.value for item in run(eval_scores, proxy, detector))


def noisy(clean: Floats, seed: int, level: float = 0.05) -> list[float]:
    return list(clean + level * np.random.default_rng(seed).standard_normal(len(clean)))


def rise_and_fall(size: int = 100, peak: float = 0.4, depth: float = 0.6) -> Floats:
    t = np.linspace(0, 1, size)
    return np.interp(t, [0, peak, 1], [0, 1, 1 - depth])


def noise_before_last(values: Sequence[float]) -> tuple[float, float]:
    """Scale and inflation without the last value, over as many values as are kept."""
    state = NoiseState()
    for value in values[:-1]:
        state = advance(state, value)
    noise = estimate(state)
    return noise.sd, noise.inflation


def definition(eval_scores: Sequence[float], proxy: Sequence[float], sigmas: float) -> float:
    """The number after all these evals, from the whole history; the evals must fill their last block."""
    count = len(eval_scores)
    if count < 6:
        return 0.0
    size = max(1, 2 ** math.ceil(math.log2(count / 128)))
    g, p = (np.asarray(x).reshape(-1, size).mean(axis=1) for x in (eval_scores, proxy))
    (sd, inflation), (proxy_sd, proxy_inflation) = noise_before_last(eval_scores), noise_before_last(proxy)
    threes = [statistics.fmean(eval_scores[end - 3 : end]) for end in range(3, count)]
    risen = max(threes) - threes[0]
    gain, doubt = max(risen, 6 * sd), sigmas + 4 * (1 - min(risen / (6 * sd), 1))
    best = 0.0
    for length in LENGTHS:
        if len(g) < 2 * length:
            break
        earlier = range(length, len(g) - length + 1)
        fall = max(g[end - length : end].mean() for end in earlier) - g[-length:].mean()
        fall_of_proxy = max(p[end - length : end].mean() for end in earlier) - p[-length:].mean()
        looks = math.sqrt(2 * math.log(len(g) / length))
        of_mean = sd * inflation / math.sqrt(length * size)
        proxy_sigmas = fall_of_proxy / (proxy_sd * proxy_inflation / math.sqrt(length * size))
        excess = fall / of_mean - looks - 3 * max(0, proxy_sigmas - looks + 2) - doubt
        half = length // 2
        older = fall + g[-length:].mean() - g[-length : half - length].mean()
        older -= sd * (inflation if half * size > 1 else 1) / math.sqrt(half * size)
        depth = min(1, excess * of_mean / gain, 2 * older / gain)
        if depth > 0:
            rises = min(max((-proxy_sigmas - 1) / 4, 0), 1)
            best = max(best, length * size / (count + 8) * depth**0.4 * (1 + 2 * rises))
    for span in (3, 4, 5, 6, 8, 12, 16, 24, 32):
        if span <= len(g):
            x = np.arange(span) - (span - 1) / 2
            if g[-span:] @ x / np.linalg.norm(x) >= 2 * sd * inflation / math.sqrt(size):
                return 0.0
    return best


@pytest.mark.parametrize("seed", range(6))
def test_it_equals_its_definition(seed: int) -> None:
    """Folded one eval at a time, over three lengths of block, the number is that of the whole history."""
    rng = np.random.default_rng(seed)
    eval_scores = noisy(rise_and_fall(400, float(rng.uniform(0.2, 0.6)), float(rng.uniform(0.1, 1.5))), seed, 0.05)
    proxy = noisy(rng.uniform(-0.5, 1) * rise_and_fall(400), seed + 100, 0.05)
    detector = PlateauDrop(sigmas=float(rng.choice([0.0, 1.5, 4.0])))
    evidence = run(eval_scores, proxy, detector)
    for count in [*range(1, 129), *range(130, 257, 14), *range(260, 401, 36)]:
        expected = definition(eval_scores[:count], proxy[:count], detector.sigmas)
        assert evidence[count - 1].value == pytest.approx(expected, rel=1e-9, abs=1e-12)


def run_planned(eval_scores: Sequence[float], planned: float) -> list[Evidence]:
    """The evidence after every eval of a run that tells its planned evals."""
    detector, found = PlateauDrop(), []
    state = detector.start()
    for index, score in enumerate(eval_scores):
        progress = min(1.0, (index + 1) / planned)
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, score, progress=progress))
        found.append(evidence)
    return found


def test_a_fall_weighs_less_early_in_a_long_plan() -> None:
    """The same evals count for less where ten times as many are planned, and for more where the run is nearly over."""
    scores = noisy(rise_and_fall(100, 0.5), 3)
    without = max(item.value for item in run(scores))
    assert max(item.value for item in run_planned(scores, 1000)) < 0.3 * without
    assert max(item.value for item in run_planned(scores, 101)) > without


def test_a_plan_that_is_overrun_counts_as_none() -> None:
    """From its end on the numbers are those of a run without a plan."""
    scores = noisy(rise_and_fall(100, 0.3), 4)
    assert [item.value for item in run_planned(scores, 60)[60:]] == [item.value for item in run(scores)[60:]]


def test_a_new_measurement_keeps_the_rest_of_the_plan() -> None:
    """Where the eval is measured anew at half of the plan, its evals are set against the other half."""
    scores, detector = noisy(rise_and_fall(100, 0.5), 5), PlateauDrop()
    state, _ = detector.step(detector.start(), Observation(MetricRole.EVAL, 0, 0.0, progress=0.5))
    state, values = detector.start_anew(state), []
    for index, score in enumerate(scores):
        item = Observation(MetricRole.EVAL, index + 1, score, progress=0.5 + (index + 1) / 400)
        state, evidence = detector.step(state, item)
        values.append(evidence.value)
    assert values == pytest.approx([item.value for item in run_planned(scores, 200)])


@given(
    detector=st.builds(PlateauDrop, sigmas=st.sampled_from([0.0, 1.5]), use_proxy=st.booleans()),
    runs=st.lists(st.tuples(st.floats(-2, 2), st.floats(-1, 1), st.integers(1, 60)), min_size=1, max_size=6),
    level=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    grain=st.sampled_from([0.0, 0.25]),
    scale=st.sampled_from([1.0, 1.0, 1e-300, 1e130, 3.7]),
    stderr=st.sampled_from([None, 0.2, math.nan]),
    planned=st.none() | st.floats(0.3, 3.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_equals_itself_done_slowly(
    detector: PlateauDrop,
    runs: list[tuple[float, float, int]],
    level: float,
    grain: float,
    scale: float,
    stderr: float | None,
    planned: float | None,
    seed: int,
) -> None:
    """Nothing that is remembered to save time, over any shape of run, changes a bit of the evidence."""
    chance, eval_scores, proxy = np.random.default_rng(seed), 0.0, 0.0
    observations: list[Observation] = []
    longest = 2 * sum(evals for _, _, evals in runs)
    for eval_slope, proxy_slope, evals in runs:
        for _ in range(evals):
            eval_scores, proxy = eval_scores + eval_slope / evals, proxy + proxy_slope / evals
            a, b, luck = eval_scores + level * chance.normal(), proxy + level * chance.normal(), chance.random()
            a = round(a / grain) * grain if grain else a
            step = len(observations)
            if MetricRole.PROXY in detector.roles and luck < 0.9:
                observations.append(Observation(MetricRole.PROXY, step, scale * b if luck > 0.02 else math.inf))
            if luck > 0.1:
                told = stderr if luck > 0.5 else None
                value, progress = scale * a if luck > 0.12 else math.nan, planned and step / longest / planned
                observations.append(Observation(MetricRole.EVAL, step, value, told, progress))
    state, evidence = detector.start(), []
    for observation in observations:
        state, item = detector.step(state, observation)
        if chance.random() < 0.02:
            state = msgspec.json.decode(msgspec.json.encode(state), type=PlateauDropState)
        evidence.append(item)
    assert evidence == slowly(detector, observations)


@pytest.mark.parametrize("level", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("size", [60, 200, 1000])
def test_a_turn_is_found(size: int, level: float) -> None:
    """The eval score that loses more than half of its gain while the proxy rises is found, and placed near its peak.

    In a short run at the threshold to suspect: to stop takes more evals than it has.
    """
    for seed in range(5):
        eval_scores, proxy = noisy(rise_and_fall(size), seed, level), noisy(np.linspace(0, 1, size), seed + 50, level)
        alarmed = [item for item in run(eval_scores, proxy) if item.value > (SUSPECT_AT if size < 100 else STOP_AT)]
        assert alarmed
        assert alarmed[0].turn_step is not None
        assert 0.2 * size < alarmed[0].turn_step < 0.65 * size


@pytest.mark.parametrize("level", [0.0, 0.05, 0.2])
def test_a_healthy_run_is_left_alone(level: float) -> None:
    """Of runs that saturate, or stay flat from the first eval on, hardly any comes near the threshold to stop."""
    t = np.linspace(0, 1, 100)
    near = 0
    for seed in range(30):
        for clean in (1 - np.exp(-4 * t), 0 * t):
            near += highest(noisy(clean, seed, level), noisy(t, seed + 50, level)) > 0.1
    assert near <= 1


def test_a_short_dip_is_no_turn() -> None:
    """A dip of half the gain that is over within a fiftieth of the run stays below the threshold to stop."""
    t = np.linspace(0, 1, 200)
    eval_scores = np.minimum(1, t / 0.3) - 0.5 * ((t > 0.6) & (t < 0.62))
    for seed in range(5):
        assert highest(noisy(eval_scores, seed), noisy(t, seed + 50)) < STOP_AT


def test_what_pulls_the_proxy_down_too_is_no_turn() -> None:
    """The same long fall counts for less than a fifth when the proxy falls alike, and for more when it rises."""
    clean = rise_and_fall()
    eval_scores = noisy(clean, 1)
    alone, falling, rising = (
        highest(eval_scores, proxy) for proxy in (None, noisy(clean, 2), noisy(np.linspace(0, 1, 100), 2))
    )
    assert falling < alone / 5
    assert rising > 1.5 * alone


def test_without_the_proxy_it_is_not_looked_at() -> None:
    """With `use_proxy` off the proxy is not even a role, and only the eval score counts."""
    assert PlateauDrop(use_proxy=False).roles == {MetricRole.EVAL}
    eval_scores = noisy(rise_and_fall(), 1)
    assert run(eval_scores, None, PlateauDrop(use_proxy=False)) == run(eval_scores)


def test_recovery_takes_the_alarm_back() -> None:
    """While the eval score climbs back the number is 0."""
    t = np.linspace(0, 1, 200)
    evidence = run(noisy(np.interp(t, [0, 0.3, 0.6, 0.8], [0, 1, 0.4, 0.8]), 3, 0.02))
    assert max(item.value for item in evidence[:121]) > 0.1
    assert all(item.value == 0 for item in evidence[130:158])
    assert evidence[150].note == "the eval score is below its best and rising"


def test_the_state_stays_small() -> None:
    """After ten thousand evals the state is no larger than after a thousand."""
    detector = PlateauDrop()
    state, sizes = detector.start(), {}
    for observation in eval_series(noisy(rise_and_fall(10_000), 0)):
        state, _ = detector.step(state, observation)
        assert len(state.scores) < 128
        assert state.size <= max(1, state.noise.seen / 64)
        if observation.step in (999, 9_999):
            sizes[observation.step] = len(msgspec.json.encode(state))
    assert sizes[9_999] < 1.5 * sizes[999] < 15_000


@pytest.mark.parametrize(
    ("eval_scores", "note"),
    [([1.0], "needs 5 more evals"), ([1.0] * 9, "not moved"), (list(range(9)), "not below its best")],
)
def test_the_note_says_what_is_missing(eval_scores: list[float], note: str) -> None:
    """Too few evals, a constant series and the lack of a fall are told apart."""
    assert note in run(eval_scores)[-1].note
