"""The adapter counts what river itself calls, goes on exactly from any stored state, and refuses what river would."""

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
from evalstop_detectors import Evidence, InvalidPolicy, policy_from_document, policy_to_document
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

from tests.detectors.strategies import RIVER, eval_series

detectors = st.builds(
    lambda river, series, memory: RiverDrift(detector=river[0], params=river[1], series=series, memory=memory),
    st.sampled_from(RIVER),
    st.sampled_from(["value", "minus_mean", "minus_best"]),
    st.sampled_from([16, 32, 1024]),
)


def fold(
    detector: RiverDrift, values: Sequence[float], stored: frozenset[int] = frozenset()
) -> tuple[list[Evidence], RiverDriftState]:
    """The evidence after each eval; at the given places the state goes through JSON."""
    state, found = detector.start(), []
    for index, item in enumerate(eval_series(values)):
        if index in stored:
            state = msgspec.json.decode(msgspec.json.encode(state), type=RiverDriftState)
        state, evidence = detector.step(state, item)
        found.append(evidence)
    return found, state


def run(seed: int, levels: Sequence[float] = (0, 4, 0, -4, 0, 2)) -> list[float]:
    chance = random.Random(seed)
    return [level + chance.gauss(0, 1) for level in levels for _ in range(20)]


def by_hand(live: Any, values: Sequence[float]) -> list[int]:
    """River's object fed with the role in units of its noise, and a count kept beside it."""
    counts, count, since, noise, unit = [], 0, 0, NoiseState(), 0.0
    for index, value in enumerate(values):
        noise = advance(noise, value)
        counts.append(0)
        if index < 7:
            continue
        if index == 7:
            unit = estimate(noise).sd
            for early in values[:8]:
                live.update((early - values[0]) / unit)
            continue
        live.update((value - values[0]) / unit)
        if live.drift_detected:
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
def test_it_counts_what_river_calls(name: str, params: dict[str, Param]) -> None:
    """One object of river, fed by hand and left to reset itself, calls the same drifts."""
    expected = by_hand(vars(drift)[name](**params), run(7))
    found, _ = fold(RiverDrift(detector=name, params=params), run(7))
    assert [item.value for item in found] == expected
    assert max(expected) > 0


@settings(max_examples=40)
@given(detector=detectors, seed=st.integers(0, 1000), places=st.sets(st.integers(0, 119), max_size=8))
def test_it_goes_on_from_any_stored_state(detector: RiverDrift, seed: int, places: set[int]) -> None:
    """A run that is stored and read back anywhere, also past what it remembers, ends as the run that never was."""
    values = run(seed)
    assert fold(detector, values, frozenset(places)) == fold(detector, values)


@pytest.mark.parametrize(("name", "params"), RIVER)
def test_drifts_occur_in_these_tests(name: str, params: dict[str, Param]) -> None:
    """The parameters that the laws are tried with let each detector call a downward drift."""
    assert max(item.value for item in fold(RiverDrift(detector=name, params=params), run(3))[0]) > 0


@given(detector=detectors, seed=st.integers(0, 1000), cut=st.integers(1, 100))
@settings(max_examples=30)
def test_a_state_may_be_gone_on_from_twice(detector: RiverDrift, seed: int, cut: int) -> None:
    """Two futures of one state do not meet in the object of river that it carried."""
    values = run(seed)
    _, state = fold(detector, values[:cut])
    futures = []
    for _ in range(2):
        now, found = state, []
        for item in eval_series(values[cut:], cut):
            now, evidence = detector.step(now, item)
            found.append(evidence)
        futures.append((found, now))
    assert futures[0] == futures[1]
    assert futures[0][0] == fold(detector, values)[0][cut:]


def test_a_state_is_not_tied_to_an_object() -> None:
    """Copies carry no object of river, and parameters other than those that it was made with do not use it."""
    values = run(1)
    ours, other = RiverDrift(params={"threshold": 10.0}), RiverDrift(params={"threshold": 1e9})
    _, state = fold(ours, values[:60])
    copied = copy.deepcopy(state)
    assert copied == state
    assert not vars(copied)
    for item in eval_series(values[60:], 60):
        state, evidence = other.step(state, item)
        copied, again = other.step(copied, item)
        assert evidence == again
    assert state == copied
    assert state != fold(ours, values)[1]


def test_a_rise_is_no_evidence() -> None:
    """Drifts upward count for nothing, and take off one that went down."""
    detector = RiverDrift(params={"min_instances": 5, "threshold": 10.0})
    rising, _ = fold(detector, run(2, (0, 4, 8, 12)))
    assert {item.value for item in rising} == {0.0}
    dipped, _ = fold(detector, run(2, (8, 0, 8)))
    assert dipped[39].value == 1
    assert dipped[59].value == 0
    assert dipped[59].turn_step is None


def test_it_places_the_fall() -> None:
    """The turn is the last eval before the means part."""
    found, _ = fold(RiverDrift(params={"threshold": 10.0}), [0.0, 0.1] * 20 + [-5.0, -5.1] * 10)
    assert (found[-1].value, found[-1].turn_step) == (1, 39)


@given(inputs=st.lists(st.integers(-3, 3).map(float), max_size=20), split=st.integers(1, 10), fall=st.integers(1, 10))
def test_the_largest_change_has_the_sign_of_the_change(inputs: list[float], split: int, fall: int) -> None:
    """Of no change there is none; of a step it is the step, and turned upside down its opposite."""
    assert largest_change([1.0] * len(inputs)) == (0.0, 0)
    change, where = largest_change([0.0] * split + [-float(fall)] * 7)
    assert where == split
    assert change == pytest.approx(-fall * math.sqrt(split * 7 / (split + 7)))
    change, where = largest_change(inputs)
    assert largest_change([-item for item in inputs]) == (-change, where)


@pytest.mark.parametrize("memory", [16, 64])
def test_its_state_is_bounded(memory: int) -> None:
    """Without a drift the inputs are cut to the later half when there are `memory` of them."""
    detector = RiverDrift(params={"threshold": 1e9, "min_instances": 8}, memory=memory)
    state, sizes = detector.start(), []
    for item in eval_series([math.sin(index) for index in range(300)]):
        state, _ = detector.step(state, item)
        sizes.append(len(state.inputs))
    assert max(sizes) == memory - 1
    assert min(sizes[memory:]) == memory // 2


def test_every_detector_of_river_for_scores_is_there() -> None:
    """ADWIN, KSWIN and PageHinkley are, and so is whatever else river has, as it comes."""
    assert {"ADWIN", "KSWIN", "PageHinkley"} <= set(drift_detectors())
    for name in drift_detectors():
        found, _ = fold(RiverDrift(detector=name), run(1))
        assert all(math.isfinite(item.value) for item in found)
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
def test_bad_parameters_are_refused(params: dict[str, Any], words: list[str]) -> None:
    """What river would refuse, now or when its window is full, is refused when the policy is read, and where."""
    document = {"name": "p", "members": [{"detector": "river_drift", "params": params}]}
    with pytest.raises(InvalidPolicy) as refused:
        policy_from_document(document)
    assert refused.value.path[:3] == ("members", 0, "params")
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_policy_with_it_is_a_document() -> None:
    """Its parameters, those of river among them, are read back as they were written."""
    params = {"detector": "KSWIN", "params": {"alpha": 0.01, "window_size": 40, "stat_size": 10, "seed": 3}}
    policy = policy_from_document({"name": "p", "members": [{"detector": "river_drift", "params": params}]})
    stored = msgspec.json.decode(msgspec.json.encode(policy_to_document(policy)))
    assert stored["members"][0]["params"] == params | {"series": "value", "memory": 1024}
    assert policy_from_document(stored) == policy


WITHOUT_RIVER = """
import sys
sys.modules["river"] = None
from evalstop_detectors import DETECTORS, InvalidPolicy, policy_from_document
assert "river_drift" not in DETECTORS and "focus" in DETECTORS
try:
    policy_from_document({"name": "p", "members": [{"detector": "river_drift"}]})
except InvalidPolicy as error:
    print(error)
"""


def test_without_river_it_says_what_to_install() -> None:
    """Where river is not installed all other detectors are there, and naming this one says what to run."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_RIVER], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert "pip install 'evalstop-detectors[river]'" in done.stdout
    assert "`$.members[0].detector`" in done.stdout
