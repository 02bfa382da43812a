"""The battery that every detector of the catalog passes: what a detector is, whatever it detects."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from evalstop_detectors import DETECTORS, Evidence, MetricRole, Observation, replay, start, step
from evalstop_detectors.policy.codec import state_from_json, state_to_json, verdict_to_document
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.references import REFERENCES
from tests.detectors.strategies import DETECTORS_DRAWN, AnyDetector, alone, finite_values, round_values, series

every_detector = pytest.mark.parametrize("name", sorted(DETECTORS))
AMOUNTS = ("min_delta", "tolerance")
# One value far below all others is an outlier to these rather than a lower level.
DOUBTING = {"bocpd", "divergence", "gao_fit", "posterior", "river_drift"}
# Nats are the unit of KL whatever the eval score is counted in.
IN_NATS = {"gao_fit", "posterior"}


def fold(detector: AnyDetector, observations: Sequence[Observation]) -> list[Evidence]:
    state, evidence = detector.start(), []
    for observation in observations:
        state, item = detector.step(state, observation)
        evidence.append(item)
    return evidence


def numbers(evidence: Sequence[Evidence]) -> list[tuple[float, int | None]]:
    return [(item.value, item.turn_step) for item in evidence]


def amounts_changed(detector: AnyDetector, change: Any) -> AnyDetector:
    """The same detector with every parameter in the unit of the role changed."""
    changed = {name: change(getattr(detector, name)) for name in AMOUNTS if hasattr(detector, name)}
    result: AnyDetector = msgspec.structs.replace(detector, **changed)  # type: ignore[type-var]
    return result


def revalued(observation: Observation, value: float) -> Observation:
    return msgspec.structs.replace(observation, value=value)


def in_another_unit(observation: Observation, exponent: int) -> Observation:
    """The value, and its standard error with it, in a unit that is a power of two of the old one."""
    stderr = None if observation.stderr is None else math.ldexp(observation.stderr, exponent)
    return msgspec.structs.replace(observation, value=math.ldexp(observation.value, exponent), stderr=stderr)


@every_detector
def test_it_is_known_by_its_name(name: str) -> None:
    """The catalog calls a detector what it calls itself, and it watches some role."""
    detector = DETECTORS[name]()
    assert detector.name == name
    assert detector.roles
    assert isinstance(detector.start(), detector.state_type)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@given(data=st.data())
def test_it_equals_its_reference(name: str, data: st.DataObject) -> None:
    """After every observation the evidence is that of the slow and obvious computation over the whole history."""
    detector = data.draw(DETECTORS_DRAWN[name])
    observations = data.draw(series(detector.roles))
    for count, (value, turn_step) in enumerate(numbers(fold(detector, observations)), start=1):
        assert (value, turn_step) == REFERENCES[name](detector, observations[:count])


@every_detector
@given(data=st.data())
def test_its_state_survives_the_codec(name: str, data: st.DataObject) -> None:
    """Cut anywhere, stored and read back in chunks, a run goes on to the same state, verdict and JSON."""
    policy = alone(data.draw(DETECTORS_DRAWN[name]))
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
    assert json.dumps(verdict_to_document(state.verdict)) == json.dumps(verdict_to_document(whole.verdict))


@every_detector
@given(data=st.data())
def test_its_numbers_are_finite(name: str, data: st.DataObject) -> None:
    """Whatever arrives, state and evidence hold only finite numbers, none of which JSON would turn to null."""
    policy = alone(data.draw(DETECTORS_DRAWN[name]))
    state = replay(policy, data.draw(series(policy.roles)))
    leaves = list(leaves_of(msgspec.to_builtins([state.states, state.evidence])))
    assert all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, int | float))
    assert json.loads(state_to_json(policy, state), parse_constant=pytest.fail)


def leaves_of(tree: Any) -> Any:
    for child in tree.values() if isinstance(tree, dict) else tree:
        yield from leaves_of(child) if isinstance(child, dict | list | tuple) else [child]


@every_detector
@given(data=st.data())
def test_its_evidence_is_of_its_kind(name: str, data: st.DataObject) -> None:
    """All evidence has the detector's kind, and lies from 0 to the largest value of that kind."""
    detector = data.draw(DETECTORS_DRAWN[name])
    for evidence in fold(detector, data.draw(series(detector.roles))):
        assert evidence.kind is detector.kind
        assert 0 <= evidence.value <= detector.kind.upper_bound


@every_detector
@given(data=st.data())
def test_its_notes_count_one_thing_in_the_singular(name: str, data: st.DataObject) -> None:
    """No note says "1 evals"."""
    detector = data.draw(DETECTORS_DRAWN[name])
    for evidence in fold(detector, data.draw(series(detector.roles))):
        assert not re.search(r"(?<![\d.])1 (more |consecutive )?(evals|values|declines)\b", evidence.note)


@every_detector
@given(data=st.data())
def test_non_finite_values_do_not_poison(name: str, data: st.DataObject) -> None:
    """NaN and infinities between the values change no evidence on the values, and by themselves move none."""
    detector = data.draw(DETECTORS_DRAWN[name])
    clean = [with_step(item, 2 * item.step) for item in data.draw(series(detector.roles, finite_values))]
    bad = {
        item.order: Observation(item.role, item.step + 1, data.draw(st.sampled_from([math.nan, math.inf, -math.inf])))
        for item in clean
        if data.draw(st.booleans())
    }
    mixed = sorted([*clean, *bad.values()], key=lambda item: item.order)
    evidence = fold(detector, mixed)
    on_values = [item for item, observation in zip(evidence, mixed, strict=True) if observation.finite]
    assert on_values == fold(detector, clean)
    if name != "non_finite":
        for index in range(1, len(mixed)):
            assert mixed[index].finite or evidence[index] == evidence[index - 1]


def with_step(observation: Observation, number: int) -> Observation:
    return msgspec.structs.replace(observation, step=number)


def without_tiny_stderr(observation: Observation) -> Observation:
    """The observation without a standard error so small that its square, in another unit, is no normal number."""
    tiny = observation.stderr is not None and 0 < observation.stderr < 1e-140
    return msgspec.structs.replace(observation, stderr=None) if tiny else observation


@every_detector
@given(data=st.data(), exponent=st.integers(-40, 40), shift=st.integers(-(10**6), 10**6))
def test_it_knows_no_unit(name: str, data: st.DataObject, exponent: int, shift: int) -> None:
    """Scaled or shifted scores, with the tolerances scaled alike, give the same evidence."""
    plain = amounts_changed(data.draw(DETECTORS_DRAWN[name]), lambda _: float(data.draw(st.integers(0, 3))))
    observations = [without_tiny_stderr(item) for item in data.draw(series(plain.roles, round_values))]
    expected = fold(plain, observations)
    scaled = amounts_changed(plain, lambda amount: math.ldexp(amount, exponent))
    kept = {MetricRole.KL} if name in IN_NATS else set[MetricRole]()
    in_unit = [item if item.role in kept else in_another_unit(item, exponent) for item in observations]
    kept.add(MetricRole.PAIRED)  # a difference has no origin
    shifted = [item if item.role in kept else revalued(item, item.value + shift) for item in observations]
    assert fold(scaled, in_unit) == expected
    assert fold(plain, shifted) == expected


@every_detector
@given(data=st.data(), stretch=st.integers(1, 10**6), offset=st.integers(0, 10**6))
def test_it_knows_only_the_order_of_steps(name: str, data: st.DataObject, stretch: int, offset: int) -> None:
    """Renumbered steps move the turn with them and change no number."""
    detector = data.draw(DETECTORS_DRAWN[name])
    observations = data.draw(series(detector.roles))
    renumbered = [with_step(item, item.step * stretch + offset) for item in observations]
    expected = [
        (value, None if turn is None else turn * stretch + offset)
        for value, turn in numbers(fold(detector, observations))
    ]
    assert numbers(fold(detector, renumbered)) == expected


@pytest.mark.parametrize("name", sorted(set(DETECTORS) - DOUBTING))
@given(data=st.data())
def test_a_worse_last_value_is_never_less_alarming(name: str, data: st.DataObject) -> None:
    """Lowering the last value of a run leaves the evidence as it is or raises it."""
    detector = data.draw(DETECTORS_DRAWN[name])
    observations = data.draw(series(detector.roles, finite_values).filter(bool))
    last = observations[-1]
    worse = revalued(last, data.draw(st.floats(max_value=last.value, allow_infinity=False, allow_nan=False)))
    assert fold(detector, [*observations[:-1], worse])[-1].value >= fold(detector, observations)[-1].value


@every_detector
@given(data=st.data())
def test_the_turn_lies_behind(name: str, data: st.DataObject) -> None:
    """A turn is placed at a step that was observed, before the present one, and only by alarming evidence."""
    detector = data.draw(DETECTORS_DRAWN[name])
    observations = data.draw(series(detector.roles))
    for index, (value, turn) in enumerate(numbers(fold(detector, observations))):
        assert turn is None or (value > 0 and turn in {item.step for item in observations[:index]})
        assert turn is None or turn < observations[index].step


@every_detector
@given(data=st.data())
def test_its_thresholds_are_in_order(name: str, data: st.DataObject) -> None:
    """Grounds to suspect come before grounds to stop, and fresh evidence is grounds for neither."""
    detector = data.draw(DETECTORS_DRAWN[name])
    suspect_at, stop_at = detector.thresholds.suspect_at, detector.thresholds.stop_at
    assert suspect_at is None or stop_at is None or suspect_at < stop_at
    assert all(threshold is None or threshold > 0 for threshold in (suspect_at, stop_at))


@every_detector
@given(data=st.data(), whole=st.integers(-3, 3))
def test_whole_numbers_are_floats(name: str, data: st.DataObject, whole: int) -> None:
    """An integer that arrives as a value is the same observation as the float, to the last byte of the state."""
    policy = alone(data.draw(DETECTORS_DRAWN[name]))
    role = data.draw(st.sampled_from(sorted(policy.roles)))
    states = [replay(policy, [Observation(role, 1, value, progress=1)]) for value in (whole, float(whole))]
    assert state_to_json(policy, states[0]) == state_to_json(policy, states[1])


@every_detector
def test_its_signals_are_signals(name: str) -> None:
    """A detector is shown roles that exist, and says so before it has seen any."""
    assert DETECTORS[name]().roles <= set(MetricRole)
