"""river_drift: it counts the drifts that River detects, continues from a stored state, and validates parameters."""

from __future__ import annotations

import copy
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from evalstop_detectors import Evidence, InvalidPolicy, policy_from_document
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.river_drift import (
    Param,
    RiverDrift,
    RiverDriftState,
    begun,
    drift_detectors,
    largest_change,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from river import drift

from tests.detectors.strategies import RIVER_PARAMETERS, eval_series

detectors = st.builds(
    lambda river, memory: RiverDrift(detector=river[0], params=river[1], memory=memory),
    st.sampled_from(RIVER_PARAMETERS),
    st.sampled_from([16, 32, 1024]),
)


def run_detector(
    detector: RiverDrift, values: Sequence[float], stored: frozenset[int] = frozenset()
) -> tuple[list[Evidence], RiverDriftState]:
    """The evidence after each eval; before the evals at the given indices the state is stored as JSON and read back."""
    state, collected = detector.start(), []
    for index, item in enumerate(eval_series(values)):
        if index in stored:
            state = msgspec.json.decode(msgspec.json.encode(state), type=RiverDriftState)
        state, evidence = detector.step(state, item)
        collected.append(evidence)
    return collected, state


def create_scores(seed: int, levels: Sequence[float] = (0, 4, 0, -4, 0, 2)) -> list[float]:
    """Noisy scores, 20 on each level."""
    rng = random.Random(seed)
    return [level + rng.gauss(0, 1) for level in levels for _ in range(20)]


def count_drifts(river_detector: Any, values: Sequence[float]) -> list[int]:
    """Feed a River detector with the values in units of their noise, and count its downward drifts."""
    counts, count, since, noise, unit = [], 0, 0, NoiseState(), 0.0
    for index, value in enumerate(values):
        noise = advance(noise, value)
        counts.append(0)
        if index < 7:
            continue
        if index == 7:
            unit = estimate(noise).sd
            for early in values[:8]:
                river_detector.update((early - values[0]) / unit)
            continue
        river_detector.update((value - values[0]) / unit)
        if river_detector.drift_detected:
            change, _ = largest_change([(item - values[0]) / unit for item in values[since : index + 1]])
            count = max(0, count + (1 if change < 0 else -1))
            since, unit = index + 1, estimate(noise).sd
        counts[-1] = count
    return counts


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("PageHinkley", {"threshold": 10.0}),
        ("PageHinkley", {"min_instances": 5, "threshold": 3, "mode": "down"}),
        ("ADWIN", {"clock": 1}),
        ("KSWIN", {"window_size": 20, "stat_size": 8, "seed": 1}),
    ],
)
def test_count_equals_drifts_of_river(name: str, params: dict[str, Param]) -> None:
    """A River detector that is fed directly and resets itself detects the same drifts."""
    expected = count_drifts(vars(drift)[name](**params), create_scores(7))
    evidence, _ = run_detector(RiverDrift(detector=name, params=params), create_scores(7))
    assert [item.value for item in evidence] == expected
    assert max(expected) > 0


@settings(max_examples=40)
@given(detector=detectors, seed=st.integers(0, 1000), indices=st.sets(st.integers(0, 119), max_size=8))
def test_stored_state_continues_exactly(detector: RiverDrift, seed: int, indices: set[int]) -> None:
    """A state that is stored and read back at any evals gives the same evidence and final state."""
    values = create_scores(seed)
    assert run_detector(detector, values, frozenset(indices)) == run_detector(detector, values)


@pytest.mark.parametrize(("name", "params"), RIVER_PARAMETERS)
def test_parameters_of_these_tests_detect_drifts(name: str, params: dict[str, Param]) -> None:
    """With the parameters of these tests, each River detector detects a downward drift."""
    assert max(item.value for item in run_detector(RiverDrift(detector=name, params=params), create_scores(3))[0]) > 0


@given(detector=detectors, seed=st.integers(0, 1000), cut=st.integers(1, 100))
@settings(max_examples=30)
def test_state_can_be_continued_twice(detector: RiverDrift, seed: int, cut: int) -> None:
    """Two continuations of one state do not share the River object that the state caches."""
    values = create_scores(seed)
    _, state = run_detector(detector, values[:cut])
    continuations = []
    for _ in range(2):
        current, collected = state, []
        for item in eval_series(values[cut:], cut):
            current, evidence = detector.step(current, item)
            collected.append(evidence)
        continuations.append((collected, current))
    assert continuations[0] == continuations[1]
    assert continuations[0][0] == run_detector(detector, values)[0][cut:]


def test_state_does_not_depend_on_its_river_object() -> None:
    """A copied state has no River object, and a detector with other parameters ignores the cached one."""
    values = create_scores(1)
    detector, other = RiverDrift(params={"threshold": 10.0}), RiverDrift(params={"threshold": 1e9})
    _, state = run_detector(detector, values[:60])
    copied = copy.deepcopy(state)
    assert copied == state
    assert not vars(copied)
    for item in eval_series(values[60:], 60):
        state, evidence = other.step(state, item)
        copied, evidence_of_copy = other.step(copied, item)
        assert evidence == evidence_of_copy
    assert state == copied
    assert state != run_detector(detector, values)[1]


def test_rise_is_no_evidence() -> None:
    """An upward drift leaves the count at 0, or lowers it by 1 after a downward drift."""
    detector = RiverDrift(params={"min_instances": 5, "threshold": 10.0})
    rising, _ = run_detector(detector, create_scores(2, (0, 4, 8, 12)))
    assert {item.value for item in rising} == {0.0}
    dipped, _ = run_detector(detector, create_scores(2, (8, 0, 8)))
    assert dipped[39].value == 1
    assert dipped[59].value == 0
    assert dipped[59].turn_step is None


def test_turn_is_placed_at_the_fall() -> None:
    """The turn is the last eval before the change of the mean."""
    evidence, _ = run_detector(RiverDrift(params={"threshold": 10.0}), [0.0, 0.1] * 20 + [-5.0, -5.1] * 10)
    assert (evidence[-1].value, evidence[-1].turn_step) == (1, 39)


@given(inputs=st.lists(st.integers(-3, 3).map(float), max_size=20), split=st.integers(1, 10), fall=st.integers(1, 10))
def test_largest_change_is_signed(inputs: list[float], split: int, fall: int) -> None:
    """The change is 0 for a constant, the step for a step, and its negative for negated values."""
    assert largest_change([1.0] * len(inputs)) == (0.0, 0)
    change, index = largest_change([0.0] * split + [-float(fall)] * 7)
    assert index == split
    assert change == pytest.approx(-fall * math.sqrt(split * 7 / (split + 7)))
    change, index = largest_change(inputs)
    assert largest_change([-item for item in inputs]) == (-change, index)


@pytest.mark.parametrize("memory", [16, 64])
def test_state_size_is_bounded(memory: int) -> None:
    """Without a drift, the older half of the inputs is dropped when `memory` is reached."""
    detector = RiverDrift(params={"threshold": 1e9, "min_instances": 8}, memory=memory)
    state, sizes = detector.start(), []
    for item in eval_series([math.sin(index) for index in range(300)]):
        state, _ = detector.step(state, item)
        sizes.append(len(state.inputs))
    assert max(sizes) == memory - 1
    assert min(sizes[memory:]) == memory // 2


def test_every_river_detector_runs() -> None:
    """ADWIN, KSWIN, PageHinkley and every other detector of River runs with its defaults and a fixed seed."""
    assert {"ADWIN", "KSWIN", "PageHinkley"} <= set(drift_detectors())
    for name in drift_detectors():
        evidence, _ = run_detector(RiverDrift(detector=name), create_scores(1))
        assert all(math.isfinite(item.value) for item in evidence)
    assert begun("KSWIN", {}, ()).seed == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"detector": "DDM"}, ["DDM", "binary errors", "ADWIN, "]),
        ({"detector": "HDDM_A"}, ["'HDDM_A'", "ADWIN, "]),
        ({"detector": "DriftRetrainingClassifier"}, ["ADWIN, "]),
        ({"detector": "__name__"}, ["ADWIN, "]),
        ({"params": {"treshold": 5}}, ["'treshold'", "min_instances, delta, threshold, alpha, mode"]),
        ({"params": {"threshold": "5"}}, ["threshold is '5'", "a number"]),
        ({"params": {"threshold": True}}, ["threshold is True", "a number"]),
        ({"params": {"threshold": math.inf}}, ["threshold is inf", "a number"]),
        ({"params": {"min_instances": 2.5}}, ["min_instances is 2.5", "whole number from 1 to 512"]),
        ({"params": {"mode": "sideways"}}, ["PageHinkley", "mode"]),
        ({"params": {"mode": 1}}, ["mode is 1", "text"]),
        ({"params": {"mode": None}}, ["params"]),
        ({"detector": "ADWIN", "params": {"clock": 0}}, ["clock is 0", "whole number from 1"]),
        ({"detector": "ADWIN", "params": {"max_buckets": 0}}, ["max_buckets is 0"]),
        ({"detector": "KSWIN", "params": {"alpha": 2}}, ["KSWIN", "Alpha"]),
        ({"detector": "KSWIN", "params": {"window_size": 20, "stat_size": 15}}, ["KSWIN", "population"]),
        ({"detector": "KSWIN", "params": {"seed": -1}}, ["seed is -1"]),
        ({"detector": "KSWIN", "params": {"window": "abc"}}, ["'window'", "alpha, window_size, stat_size, seed"]),
        ({"detector": "KSWIN", "memory": 100}, ["window_size is 100", "to 50, half of `memory`"]),
        (
            {"detector": "DummyDriftDetector", "params": {"dynamic_cloning": 1}},
            ["dynamic_cloning is 1", "true or false"],
        ),
    ],
)
def test_invalid_parameters_are_refused(params: dict[str, Any], words: list[str]) -> None:
    """Parameters that River would refuse now or later are refused with their path when the policy is read."""
    document = {"name": "p", "members": [{"detector": "river_drift", "params": params}]}
    with pytest.raises(InvalidPolicy) as error:
        policy_from_document(document)
    assert "$.members[0].params" in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_river_is_not_imported_before_it_can_report() -> None:
    """With river's own parameters a policy is read, and 29 evals are taken in, without any import of river; PageHinkley
    never imports the other detectors, which bring scipy.stats."""
    program = (
        "import sys; from evalstop_detectors import *; policy = policy_from_document({'name': 'p', 'members': "
        "[{'detector': 'river_drift', 'params': {'memory': 256}}]}); "
        "run = [Observation(MetricRole.EVAL, step, step % 3) for step in range(30)]; "
        "state = replay(policy, run[:29]); assert 'river' not in sys.modules; "
        "advance(policy, state, run[29:]); assert 'river' in sys.modules; "
        "assert not {'river.drift', 'scipy.stats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
