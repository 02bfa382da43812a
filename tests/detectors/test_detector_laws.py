"""What holds of one detector and not of every other: its parameters' laws, and small runs worked out by hand."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from evalstop_detectors import Evidence, Kind, MetricRole, Observation, Thresholds
from evalstop_detectors.detectors.fixed_progress import FixedProgress
from evalstop_detectors.detectors.k_below_best import KBelowBest
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.loss_plateau import LossPlateau
from evalstop_detectors.detectors.non_finite import NonFinite
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import AnyDetector, amounts, eval_series, series

evals = series({MetricRole.EVAL})
counting = st.sampled_from([KDecline(), KBelowBest()])


def counts(detector: AnyDetector, observations: list[Observation]) -> list[float]:
    state, found = detector.start(), []
    for observation in observations:
        state, evidence = detector.step(state, observation)
        found.append(evidence.value)
    return found


def never_more(stricter: AnyDetector, detector: AnyDetector, observations: list[Observation]) -> bool:
    pairs = zip(counts(stricter, observations), counts(detector, observations), strict=True)
    return all(ours <= theirs for ours, theirs in pairs)


@given(observations=evals, small=amounts, large=amounts)
def test_a_larger_min_delta_counts_no_more_declines(
    observations: list[Observation], small: float, large: float
) -> None:
    """Asking for larger falls never lengthens a run of declines."""
    small, large = sorted([small, large])
    assert never_more(KDecline(min_delta=large), KDecline(min_delta=small), observations)


@given(observations=evals, small=amounts, large=amounts)
def test_a_larger_tolerance_counts_no_more_values_below_the_best(
    observations: list[Observation], small: float, large: float
) -> None:
    """A wider band under the best never lengthens a run of values below it."""
    small, large = sorted([small, large])
    assert never_more(KBelowBest(tolerance=large), KBelowBest(tolerance=small), observations)


@given(observations=evals, detector=counting, short=st.integers(0, 20), more=st.integers(0, 20))
def test_a_longer_warm_up_counts_no_more(
    observations: list[Observation], detector: KDecline | KBelowBest, short: int, more: int
) -> None:
    """A longer warm-up never lengthens a count."""
    longer = msgspec.structs.replace(detector, warmup_evals=short + more)
    assert never_more(longer, msgspec.structs.replace(detector, warmup_evals=short), observations)


@given(observations=evals, detector=counting, k=st.integers(1, 20))
def test_k_is_a_threshold_only(observations: list[Observation], detector: KDecline | KBelowBest, k: int) -> None:
    """k changes when a count is grounds to stop, never the count."""
    assert counts(detector, observations) == counts(msgspec.structs.replace(detector, k=k), observations)


@given(observations=evals)
def test_a_run_of_declines_lies_below_the_best(observations: list[Observation]) -> None:
    """Whatever the level rule with no tolerance misses, consecutive declines miss too."""
    assert never_more(KDecline(), KBelowBest(), observations)


@given(observations=series({MetricRole.PROXY, MetricRole.LOSS}))
def test_progress_never_goes_back(observations: list[Observation]) -> None:
    """The share of planned steps that are done only grows."""
    seen = counts(FixedProgress(), observations)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("detector", "scores", "expected"),
    [
        (KDecline(), [3, 2, 1, 1, 0], [0, 1, 2, 0, 1]),
        (KDecline(), [3, 2, math.nan, 1, -math.inf, 0], [0, 1, 1, 2, 2, 3]),
        (KDecline(min_delta=1), [3, 2, 0.5, -2], [0, 0, 1, 2]),
        (KDecline(warmup_evals=3), [5, 4, 3, 2, 1], [0, 0, 0, 1, 2]),
        (KDecline(warmup_evals=1), [5, 4, 3], [0, 1, 2]),
        (KDecline(), [1.7e308, -1.7e308], [0, 1]),
        (KBelowBest(), [3, 1, 2, 3, 2, 4], [0, 1, 2, 0, 1, 0]),
        (KBelowBest(tolerance=1), [3, 2, 1, 0, 2.5], [0, 0, 1, 2, 0]),
        (KBelowBest(warmup_evals=3), [5, 4, 3, 2, 1], [0, 0, 0, 1, 2]),
        (LossPlateau(), [-3, -2, -2, math.nan, -4, -1], [0, 0, 1, 1, 2, 0]),
        (LossPlateau(min_delta=1), [0, 1, 2, 2.5], [0, 1, 0, 1]),
        (NonFinite(), [math.nan, 1, math.inf, math.nan, 0], [1, 0, 1, 2, 0]),
    ],
)
def test_small_runs(detector: AnyDetector, scores: list[float], expected: list[float]) -> None:
    """Counts over short runs are those that one gets on paper."""
    assert counts(detector, eval_series(scores)) == expected


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        (KDecline(k=1), Thresholds(None, 1)),
        (KDecline(k=3), Thresholds(2, 3)),
        (KBelowBest(k=5), Thresholds(4, 5)),
        (LossPlateau(patience=7), Thresholds(None, 7)),
        (FixedProgress(fraction=0.25), Thresholds(None, 0.25)),
        (NonFinite(), Thresholds(1, None)),
    ],
)
def test_thresholds_follow_from_the_parameters(detector: AnyDetector, expected: Thresholds) -> None:
    """One short of k is grounds to suspect, k to stop; the strawmen only stop; a NaN is only suspect."""
    assert detector.thresholds == expected


def test_a_run_without_planned_steps_makes_no_progress() -> None:
    """Progress that was never said, or is no number, counts as unknown and is noted."""
    detector = FixedProgress()
    for progress in (None, math.nan, math.inf):
        _, evidence = detector.step(detector.start(), Observation(MetricRole.PROXY, 1, 0.0, progress=progress))
        assert evidence.value == 0
        assert "no planned number" in evidence.note


@pytest.mark.parametrize("detector", [KDecline(warmup_evals=2), KBelowBest(warmup_evals=2)])
def test_a_warm_up_is_noted(detector: AnyDetector) -> None:
    """While a detector warms up its note says how far it is, and afterwards what it counts."""
    state, notes = detector.start(), []
    for observation in eval_series([5, 4, 3, 2]):
        state, evidence = detector.step(state, observation)
        notes.append(evidence.note)
    assert notes[0] == "warming up: 1 of 2 values of eval seen"
    assert all("consecutive" in note for note in notes[1:])


@pytest.mark.parametrize(
    ("kind", "value", "reached"),
    [(Kind.COUNT, 3, True), (Kind.COUNT, 2, False), (Kind.FRACTION, 3.5, True), (Kind.P_VALUE, 2, True)],
)
def test_alarm_has_a_direction(kind: Kind, value: float, reached: bool) -> None:
    """Counts and fractions alarm when large, p-values when small, and a threshold of None is never reached."""
    assert Evidence(kind, value).reaches(3) is reached
    assert not Evidence(kind, value).reaches(None)
    assert Evidence(kind, 3).reaches(3)


def test_observations_are_plain_numbers() -> None:
    """Integers and numpy's scalars become plain numbers on entry, so that every state can be stored."""
    observation = Observation(MetricRole.EVAL, 7, np.float64(0.5), np.float64(1), np.float64(0.25))
    assert [type(item) for item in msgspec.structs.astuple(observation)[1:5]] == [int, float, float, float]
    assert Observation(MetricRole.EVAL, 1, 2**53 + 1).value == 2.0**53
    assert type(Observation(MetricRole.EVAL, np.int64(7), 1.0).step) is int  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Observation(MetricRole.EVAL, 1.5, 1.0)  # type: ignore[arg-type]
