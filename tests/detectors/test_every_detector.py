"""Tests that every detector of the catalog must pass."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from evalstop_detectors import DETECTORS, Evidence, MetricRole, Observation, replay, start, step
from evalstop_detectors.policy.state import state_from_json, state_to_json
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.references import REFERENCES
from tests.detectors.strategies import (
    DETECTOR_STRATEGIES,
    AnyDetector,
    collect_evidence,
    finite_values,
    round_values,
    series,
    single_member_policy,
)

every_detector = pytest.mark.parametrize("name", sorted(DETECTORS))
AMOUNTS = ("min_delta",)
# To these detectors one value far below the others is an outlier, not a lower level.
ROBUST_TO_OUTLIERS = {"divergence", "gao_fit", "posterior", "river_drift", "sudden_change"}
# These detectors use KL in nats, whatever the unit of the eval.
USES_KL_IN_NATS = {"gao_fit", "posterior"}


def values_and_turns(evidence: Sequence[Evidence]) -> list[tuple[float, int | None]]:
    """Value and turn step of each evidence."""
    return [(item.value, item.turn_step) for item in evidence]


def map_amounts(detector: AnyDetector, change: Any) -> AnyDetector:
    """The detector with `change` applied to each parameter in the unit of its role."""
    changed = {name: change(getattr(detector, name)) for name in AMOUNTS if hasattr(detector, name)}
    result: AnyDetector = msgspec.structs.replace(detector, **changed)
    return result


def with_value(observation: Observation, value: float) -> Observation:
    return msgspec.structs.replace(observation, value=value)


def scale_observation(observation: Observation, exponent: int) -> Observation:
    """Value and standard error times 2 to the power of `exponent`."""
    stderr = None if observation.stderr is None else math.ldexp(observation.stderr, exponent)
    return msgspec.structs.replace(observation, value=math.ldexp(observation.value, exponent), stderr=stderr)


@every_detector
def test_name_in_catalog_matches_detector(name: str) -> None:
    """A detector has its catalog name, at least one role and a start state of its state type."""
    detector = DETECTORS[name]()
    assert detector.name == name
    assert detector.roles
    assert isinstance(detector.start(), detector.state_type)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@given(data=st.data())
def test_evidence_equals_slow_reference(name: str, data: st.DataObject) -> None:
    """After each observation, value and turn equal those of the slow reference on the whole history."""
    detector = data.draw(DETECTOR_STRATEGIES[name])
    observations = data.draw(series(detector.roles))
    for count, (value, turn_step) in enumerate(values_and_turns(collect_evidence(detector, observations)), start=1):
        assert (value, turn_step) == REFERENCES[name](detector, observations[:count])


@every_detector
@given(data=st.data())
def test_stored_state_continues_exactly(name: str, data: st.DataObject) -> None:
    """A run whose state is stored and read at any points ends in the same state, verdict and JSON. State and evidence
    hold only finite numbers, so that JSON can store them."""
    policy = single_member_policy(data.draw(DETECTOR_STRATEGIES[name]))
    observations = data.draw(series(policy.roles))
    cuts = data.draw(st.sets(st.integers(0, len(observations))))
    state = start(policy)
    for index, observation in enumerate(observations):
        if index in cuts:
            stored = state_to_json(policy, state)
            restored = state_from_json(policy, stored)
            assert restored == state
            assert state_to_json(policy, restored) == stored
            state = restored
        state, _ = step(policy, state, observation)
    whole = replay(policy, observations)
    assert state == whole
    assert msgspec.json.encode(state.verdict) == msgspec.json.encode(whole.verdict)
    leaves = list(iterate_leaves(msgspec.to_builtins([whole.states, whole.evidence])))
    assert all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, int | float))


def iterate_leaves(tree: Any) -> Any:
    """The leaves of nested dictionaries and lists."""
    for child in tree.values() if isinstance(tree, dict) else tree:
        yield from iterate_leaves(child) if isinstance(child, dict | list | tuple) else [child]


@pytest.mark.slow
@every_detector
def test_state_does_not_grow_with_the_run(name: str) -> None:
    """From the 300th step on to the 1,500th, the stored state grows by less than half."""
    detector, rng = DETECTORS[name](), random.Random(0)
    state, sizes = detector.start(), dict[int, int]()
    for number in range(1500):
        for role in sorted(detector.roles):
            state, _ = detector.step(state, Observation(role, number, rng.gauss(0, 1) + number / 300, progress=0.5))
        if number % 10 == 0:
            sizes[number] = len(msgspec.json.encode(state))
    assert max(sizes[number] for number in range(300, 1500, 10)) < 1.5 * max(
        sizes[number] for number in range(0, 300, 10)
    )


@every_detector
@given(data=st.data())
def test_evidence_has_range_turn_and_note(name: str, data: st.DataObject) -> None:
    """Evidence has the detector's kind and a value between 0 and the upper bound of that kind. A turn is an observed
    step before the current one, and requires evidence above 0. No note says "1 evals" or the like."""
    detector = data.draw(DETECTOR_STRATEGIES[name])
    observations = data.draw(series(detector.roles))
    for index, evidence in enumerate(collect_evidence(detector, observations)):
        assert evidence.kind is detector.kind
        assert 0 <= evidence.value <= detector.kind.upper_bound
        turn = evidence.turn_step
        assert turn is None or (evidence.value > 0 and turn in {item.step for item in observations[:index]})
        assert turn is None or turn < observations[index].step
        assert not re.search(r"(?<![\d.])1 (more |consecutive )?(evals|values|declines)\b", evidence.note)


@every_detector
@given(data=st.data())
def test_non_finite_values_change_nothing(name: str, data: st.DataObject) -> None:
    """NaN and infinities leave the evidence as it was, and do not affect the evidence of later values."""
    detector = data.draw(DETECTOR_STRATEGIES[name])
    clean = [with_step(item, 2 * item.step) for item in data.draw(series(detector.roles, finite_values))]
    bad = {
        item.order: Observation(item.role, item.step + 1, data.draw(st.sampled_from([math.nan, math.inf, -math.inf])))
        for item in clean
        if data.draw(st.booleans())
    }
    mixed = sorted([*clean, *bad.values()], key=lambda item: item.order)
    evidence = collect_evidence(detector, mixed)
    on_values = [item for item, observation in zip(evidence, mixed, strict=True) if observation.finite]
    assert on_values == collect_evidence(detector, clean)
    if name != "non_finite":
        for index in range(1, len(mixed)):
            assert mixed[index].finite or evidence[index] == evidence[index - 1]


def with_step(observation: Observation, number: int) -> Observation:
    return msgspec.structs.replace(observation, step=number)


def drop_tiny_stderr(observation: Observation) -> Observation:
    """Drop a standard error whose square could become subnormal in another unit."""
    tiny = observation.stderr is not None and 0 < observation.stderr < 1e-140
    return msgspec.structs.replace(observation, stderr=None) if tiny else observation


@every_detector
@given(data=st.data(), exponent=st.integers(-40, 40), shift=st.integers(-(10**6), 10**6))
def test_evidence_is_invariant_to_scale_and_shift(name: str, data: st.DataObject, exponent: int, shift: int) -> None:
    """Scaled scores with scaled tolerances, and shifted scores, give the same evidence."""
    plain = map_amounts(data.draw(DETECTOR_STRATEGIES[name]), lambda _: float(data.draw(st.integers(0, 3))))
    observations = [drop_tiny_stderr(item) for item in data.draw(series(plain.roles, round_values))]
    expected = collect_evidence(plain, observations)
    scaled = map_amounts(plain, lambda amount: math.ldexp(amount, exponent))
    unchanged_roles = {MetricRole.KL} if name in USES_KL_IN_NATS else set[MetricRole]()
    scaled_observations = [
        item if item.role in unchanged_roles else scale_observation(item, exponent) for item in observations
    ]
    # A difference does not shift, and the zero of an entropy or a length has a meaning.
    unchanged_roles |= {MetricRole.PAIRED} | (set(plain.roles) if name == "sudden_change" else set())
    shifted = [item if item.role in unchanged_roles else with_value(item, item.value + shift) for item in observations]
    assert collect_evidence(scaled, scaled_observations) == expected
    assert collect_evidence(plain, shifted) == expected


@every_detector
@given(data=st.data(), stretch=st.integers(1, 10**6), offset=st.integers(0, 10**6))
def test_evidence_depends_on_step_order_only(name: str, data: st.DataObject, stretch: int, offset: int) -> None:
    """Renumbered steps move the turn step accordingly and change no value."""
    detector = data.draw(DETECTOR_STRATEGIES[name])
    observations = data.draw(series(detector.roles))
    renumbered = [with_step(item, item.step * stretch + offset) for item in observations]
    expected = [
        (value, None if turn is None else turn * stretch + offset)
        for value, turn in values_and_turns(collect_evidence(detector, observations))
    ]
    assert values_and_turns(collect_evidence(detector, renumbered)) == expected


@pytest.mark.parametrize("name", sorted(set(DETECTORS) - ROBUST_TO_OUTLIERS))
@given(data=st.data())
def test_lower_last_value_never_lowers_the_evidence(name: str, data: st.DataObject) -> None:
    """If the last value is lower, the evidence is at least as high."""
    detector = data.draw(DETECTOR_STRATEGIES[name])
    observations = data.draw(series(detector.roles, finite_values).filter(bool))
    last = observations[-1]
    worse = with_value(last, data.draw(st.floats(max_value=last.value, allow_infinity=False, allow_nan=False)))
    before, after = (collect_evidence(detector, [*observations[:-1], item])[-1] for item in (last, worse))
    assert after.value >= before.value


@every_detector
@given(data=st.data())
def test_suspect_threshold_is_below_stop_threshold(name: str, data: st.DataObject) -> None:
    """Both thresholds are above 0, and the one to suspect is lower than the one to stop."""
    detector = data.draw(DETECTOR_STRATEGIES[name])
    suspect_at, stop_at = detector.thresholds.suspect_at, detector.thresholds.stop_at
    assert suspect_at is None or stop_at is None or suspect_at < stop_at
    assert all(threshold is None or threshold > 0 for threshold in (suspect_at, stop_at))
