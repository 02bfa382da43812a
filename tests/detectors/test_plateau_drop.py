"""plateau_drop: equal to its slow reference, alarms on turns, and none on dips, recoveries or common falls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from evalstop_detectors import Evidence, MetricRole, Observation
from evalstop_detectors.detectors.plateau_drop import PlateauDrop, PlateauDropState
from evalstop_detectors.policy.calibration import default_thresholds
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.detectors.evidence import collect_evidence
from tests.detectors.plateau_drop_reference import compute_reference_evidence

Floats = NDArray[np.float64]
STOP_AT = default_thresholds(PlateauDrop()).stop_at or math.nan
SUSPECT_AT = default_thresholds(PlateauDrop()).suspect_at or math.nan


def run_detector(
    eval_scores: Sequence[float], proxy: Sequence[float] | None = None, detector: PlateauDrop | None = None
) -> list[Evidence]:
    """The evidence after each eval."""
    detector = detector or PlateauDrop()
    state, collected = detector.start(), []
    for index, score in enumerate(eval_scores):
        if proxy is not None:
            state, _ = detector.step(state, Observation(MetricRole.PROXY, index, proxy[index]))
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, index, score))
        collected.append(evidence)
    return collected


def find_highest_value(
    eval_scores: Sequence[float], proxy: Sequence[float] | None = None, detector: PlateauDrop | None = None
) -> float:
    """The highest value over a run."""
    return max(item.value for item in run_detector(eval_scores, proxy, detector))


def add_noise(clean: Floats, seed: int, level: float = 0.05) -> list[float]:
    """Add Gaussian noise of this standard deviation."""
    return list(clean + level * np.random.default_rng(seed).standard_normal(len(clean)))


def rise_and_fall(size: int = 100, peak: float = 0.4, depth: float = 0.6) -> Floats:
    """A rise from 0 to 1 up to the share `peak` of the run, and a fall by `depth`."""
    t = np.linspace(0, 1, size)
    return np.interp(t, [0, peak, 1], [0, 1, 1 - depth])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 6))])
def test_rise_and_fall_equals_slow_reference(seed: int) -> None:
    """With blocks of 1, 2 and 4 evals, a rise and fall gives the same bits as the slow reference."""
    rng = np.random.default_rng(seed)
    eval_scores = add_noise(rise_and_fall(400, float(rng.uniform(0.2, 0.6)), float(rng.uniform(0.1, 1.5))), seed, 0.05)
    proxy = add_noise(rng.uniform(-0.5, 1) * rise_and_fall(400), seed + 100, 0.05)
    detector = PlateauDrop(sigmas=float(rng.choice([0.0, 1.5, 4.0])))
    observations = [
        Observation(role, step, value)
        for step, values in enumerate(zip(proxy, eval_scores, strict=True))
        for role, value in zip((MetricRole.PROXY, MetricRole.EVAL), values, strict=True)
    ]
    assert collect_evidence(detector, observations) == compute_reference_evidence(detector, observations)


def run_planned(eval_scores: Sequence[float], planned: float) -> list[Evidence]:
    """The evidence after each eval of a run that reports its progress."""
    observations = [
        Observation(MetricRole.EVAL, index, score, progress=min(1.0, (index + 1) / planned))
        for index, score in enumerate(eval_scores)
    ]
    return collect_evidence(PlateauDrop(), observations)


def test_fall_counts_less_early_in_the_plan() -> None:
    """The same evals give a lower value if 10 times as many are planned, and a higher one near the end of the plan."""
    scores = add_noise(rise_and_fall(100, 0.5), 3)
    without = max(item.value for item in run_detector(scores))
    assert max(item.value for item in run_planned(scores, 1000)) < 0.3 * without
    assert max(item.value for item in run_planned(scores, 101)) > without


def test_overrun_plan_is_ignored() -> None:
    """From the end of the plan on, the values equal those of a run without a plan."""
    scores = add_noise(rise_and_fall(100, 0.3), 4)
    assert [item.value for item in run_planned(scores, 60)[60:]] == [item.value for item in run_detector(scores)[60:]]


def test_new_eval_version_keeps_the_rest_of_the_plan() -> None:
    """If the eval version changes at half of the plan, progress is counted within the other half."""
    scores, detector = add_noise(rise_and_fall(100, 0.5), 5), PlateauDrop()
    state, _ = detector.step(detector.start(), Observation(MetricRole.EVAL, 0, 0.0, progress=0.5))
    state, values = detector.start_anew(state), []
    for index, score in enumerate(scores):
        item = Observation(MetricRole.EVAL, index + 1, score, progress=0.5 + (index + 1) / 400)
        state, evidence = detector.step(state, item)
        values.append(evidence.value)
    assert values == pytest.approx([item.value for item in run_planned(scores, 200)])


@pytest.mark.slow
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
def test_evidence_equals_slow_reference(
    detector: PlateauDrop,
    runs: list[tuple[float, float, int]],
    level: float,
    grain: float,
    scale: float,
    stderr: float | None,
    planned: float | None,
    seed: int,
) -> None:
    """For any shape of run the incremental state gives the same bits as the slow reference."""
    rng, eval_scores, proxy = np.random.default_rng(seed), 0.0, 0.0
    observations: list[Observation] = []
    longest = 2 * sum(evals for _, _, evals in runs)
    for eval_slope, proxy_slope, evals in runs:
        for _ in range(evals):
            eval_scores, proxy = eval_scores + eval_slope / evals, proxy + proxy_slope / evals
            a, b, choice = eval_scores + level * rng.normal(), proxy + level * rng.normal(), rng.random()
            a = round(a / grain) * grain if grain else a
            step = len(observations)
            if MetricRole.PROXY in detector.roles and choice < 0.9:
                observations.append(Observation(MetricRole.PROXY, step, scale * b if choice > 0.02 else math.inf))
            if choice > 0.1:
                reported_stderr = stderr if choice > 0.5 else None
                value, progress = scale * a if choice > 0.12 else math.nan, planned and step / longest / planned
                observations.append(Observation(MetricRole.EVAL, step, value, reported_stderr, progress))
    state, evidence = detector.start(), []
    for observation in observations:
        state, item = detector.step(state, observation)
        if rng.random() < 0.02:
            state = msgspec.json.decode(msgspec.json.encode(state), type=PlateauDropState)
        evidence.append(item)
    assert evidence == compute_reference_evidence(detector, observations)


@pytest.mark.parametrize("level", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("size", [60, 200, 1000])
def test_turn_is_found(size: int, level: float) -> None:
    """A loss of more than half of the gain under a rising proxy raises an alarm, with the turn near the peak.

    Short runs reach only the threshold to suspect, because a stop takes more evals.
    """
    for seed in range(5):
        eval_scores, proxy = (
            add_noise(rise_and_fall(size), seed, level),
            add_noise(np.linspace(0, 1, size), seed + 50, level),
        )
        alarms = [
            item for item in run_detector(eval_scores, proxy) if item.value > (SUSPECT_AT if size < 100 else STOP_AT)
        ]
        assert alarms
        assert alarms[0].turn_step is not None
        assert 0.2 * size < alarms[0].turn_step < 0.65 * size


@pytest.mark.parametrize("level", [0.0, 0.05, 0.2])
def test_healthy_run_is_not_stopped(level: float) -> None:
    """Of 60 saturating or flat runs at most one exceeds 0.1."""
    t = np.linspace(0, 1, 100)
    exceeding = 0
    for seed in range(30):
        for clean in (1 - np.exp(-4 * t), 0 * t):
            exceeding += find_highest_value(add_noise(clean, seed, level), add_noise(t, seed + 50, level)) > 0.1
    assert exceeding <= 1


def test_short_dip_does_not_stop() -> None:
    """A dip of half the gain that lasts 2 % of the run stays below the threshold to stop."""
    t = np.linspace(0, 1, 200)
    eval_scores = np.minimum(1, t / 0.3) - 0.5 * ((t > 0.6) & (t < 0.62))
    for seed in range(5):
        assert find_highest_value(add_noise(eval_scores, seed), add_noise(t, seed + 50)) < STOP_AT


def test_common_fall_counts_less() -> None:
    """The same fall counts less than a fifth if the proxy falls alike, and more if the proxy rises."""
    clean = rise_and_fall()
    eval_scores = add_noise(clean, 1)
    without_proxy, falling, rising = (
        find_highest_value(eval_scores, proxy)
        for proxy in (None, add_noise(clean, 2), add_noise(np.linspace(0, 1, 100), 2))
    )
    assert falling < without_proxy / 5
    assert rising > 1.5 * without_proxy


def test_use_proxy_off_ignores_the_proxy() -> None:
    """Without `use_proxy`, the proxy is not among the roles and the evidence depends on the eval only."""
    assert PlateauDrop(use_proxy=False).roles == {MetricRole.EVAL}
    eval_scores = add_noise(rise_and_fall(), 1)
    assert run_detector(eval_scores, None, PlateauDrop(use_proxy=False)) == run_detector(eval_scores)


def test_recovery_resets_the_value() -> None:
    """While the eval rises again, the value is 0 and the note says so."""
    t = np.linspace(0, 1, 200)
    evidence = run_detector(add_noise(np.interp(t, [0, 0.3, 0.6, 0.8], [0, 1, 0.4, 0.8]), 3, 0.02))
    assert max(item.value for item in evidence[:121]) > 0.1
    assert all(item.value == 0 for item in evidence[130:158])
    assert evidence[150].note == "the eval score is below its best, but a span of last evals slopes up"


def test_fall_after_a_sharp_peak_is_not_called_a_rise() -> None:
    """While the rise to the peak outweighs the fall since, the note does not say that the eval rises."""
    scores = np.array([float(step) for step in range(21)] + [20 * 0.9**step for step in range(1, 6)])
    evidence = run_detector(add_noise(scores, 1, 0.2))
    assert "slopes up" in evidence[24].note
    assert not any("rising" in item.note for item in evidence)


@pytest.mark.parametrize(
    ("eval_scores", "note"),
    [([1.0], "needs 5 more evals"), ([1.0] * 9, "not moved"), (list(range(9)), "not below its best")],
)
def test_note_explains_a_missing_value(eval_scores: list[float], note: str) -> None:
    """The note distinguishes too few evals, a constant series and a series without a fall."""
    assert note in run_detector(eval_scores)[-1].note
