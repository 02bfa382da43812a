"""river_drift: it counts the drifts that River detects, and continues from a stored state."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from evalstop_detectors import Evidence
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.river_drift import RiverDrift, RiverDriftState, begun, largest_change
from hypothesis import given, settings
from hypothesis import strategies as st
from river import drift

from tests.detectors.strategies import eval_series

NAMES: Sequence[Any] = ("ADWIN", "KSWIN", "PageHinkley")
detectors = st.builds(RiverDrift, st.sampled_from(NAMES))


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


def create_scores(seed: int, levels: Sequence[float] = (0, 40, 0, -40, 0, 20)) -> list[float]:
    """Noisy scores, 80 on each level."""
    rng = random.Random(seed)
    return [level + rng.gauss(0, 1) for level in levels for _ in range(80)]


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


@pytest.mark.parametrize("name", NAMES)
def test_count_equals_drifts_of_river(name: Any) -> None:
    """A River detector that is fed directly and resets itself detects the same drifts."""
    expected = count_drifts(vars(drift)[name](**({"seed": 1} if name == "KSWIN" else {})), create_scores(7))
    evidence, _ = run_detector(RiverDrift(name), create_scores(7))
    assert [item.value for item in evidence] == expected
    assert max(expected) > 0


@given(detector=detectors, seed=st.integers(0, 1000), cut=st.integers(1, 400))
@settings(max_examples=10, deadline=None)
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
    """A copied state has no River object, and a detector of another kind ignores the cached one."""
    values = create_scores(1)
    _, state = run_detector(RiverDrift("PageHinkley"), values[:60])
    copied = copy.deepcopy(state)
    assert copied == state
    assert not vars(copied)
    for item in eval_series(values[60:], 60):
        state, evidence = RiverDrift("ADWIN").step(state, item)
        copied, evidence_of_copy = RiverDrift("ADWIN").step(copied, item)
        assert evidence == evidence_of_copy
    assert state == copied


def test_rise_is_no_evidence() -> None:
    """An upward drift leaves the count at 0, or lowers it by 1 after a downward drift."""
    rising, _ = run_detector(RiverDrift(), create_scores(2, (0, 40, 80, 120)))
    assert {item.value for item in rising} == {0.0}
    dipped, _ = run_detector(RiverDrift(), create_scores(2, (80, 0, 80)))
    assert dipped[159].value == 1
    assert dipped[239].value == 0
    assert dipped[239].turn_step is None


def test_turn_is_placed_at_the_fall() -> None:
    """The turn is the last eval before the change of the mean."""
    evidence, _ = run_detector(RiverDrift(), [0.0, 0.1] * 20 + [-5.0, -5.1] * 10)
    assert (evidence[-1].value, evidence[-1].turn_step) == (1, 39)


def test_seed_of_kswin_is_fixed() -> None:
    """KSWIN draws, so that its seed is always the same."""
    assert begun("KSWIN", ()).seed == 1  # type: ignore[attr-defined]


def test_river_is_not_imported_before_it_can_report() -> None:
    """With river's own parameters a policy is read, and 29 evals are taken in, without any import of river; PageHinkley
    never imports the other detectors, which bring scipy.stats."""
    program = (
        "import sys; from evalstop_detectors import *; policy = policy_from_document({'name': 'p', 'members': "
        "[{'detector': 'river_drift'}]}); "
        "run = [Observation(MetricRole.EVAL, step, step % 3) for step in range(30)]; "
        "state = replay(policy, run[:29]); assert 'river' not in sys.modules; "
        "advance(policy, state, run[29:]); assert 'river' in sys.modules; "
        "assert not {'river.drift', 'scipy.stats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
