"""posterior: integer arithmetic, and clear cases."""

from __future__ import annotations

import hashlib
import math
from importlib import resources

import numpy as np
from evalstop_detectors import MetricRole, Observation
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.posterior import network
from evalstop_detectors.posterior.features import FEATURES, LIMIT, FeatureState, Given, advance
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import collect_values

eval_values = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -1.0])
shares = st.none() | st.floats(0, 2)
given_values = st.builds(Given, eval_values, shares, st.none() | eval_values, shares, shares)


def run_detector(scores: list[float], planned: int | None = None, detector: Posterior | None = None) -> list[float]:
    """The probability after each eval, with progress if a length is planned."""
    observations = [
        Observation(MetricRole.EVAL, step, score, progress=None if planned is None else (step + 1) / planned)
        for step, score in enumerate(scores)
    ]
    return collect_values(detector or Posterior(), observations)


@given(run=st.lists(given_values, min_size=12, max_size=12))
def test_features_are_finite(run: list[Given]) -> None:
    """Features are finite numbers after each eval, whatever the run gave."""
    state = FeatureState()
    for item in run:
        state, features = advance(state, item)
        assert np.isfinite(features).all()


@given(data=st.data())
def test_hidden_state_is_whole_numbers(data: st.DataObject) -> None:
    """The network's state is made of integers that fit into 16 bits."""
    shipped, hidden = network.load_network(), np.zeros(network.HIDDEN)
    values = st.lists(st.floats(-2 * LIMIT, 2 * LIMIT), min_size=FEATURES, max_size=FEATURES)
    for _ in range(3):
        hidden = shipped.step(hidden, network.round_features(data.draw(values)))
        assert np.array_equal(hidden, np.floor(hidden))
        assert np.abs(hidden).max() <= network.STATE_ONE


def test_network_sums_stay_below_2_to_53() -> None:
    """The largest sum that any input can cause is below 2^53, so that float64 is exact."""
    shipped = network.load_network()
    inputs = np.repeat([LIMIT * network.FEATURE_ONE, network.STATE_ONE], [FEATURES, network.HIDDEN])
    sums = np.abs(shipped.of_inputs) @ inputs + np.abs(shipped.of_inputs_offset)
    gates, of_features, of_state = np.split(sums, [2 * network.HIDDEN, 3 * network.HIDDEN])
    unit = 2.0**10 / network.SUM_ONE  # of the gates' sums, which are in entries of the table
    assert gates.max() < 2**53 * unit
    assert of_state.max() * network.STATE_ONE < 2**53
    assert (of_features + of_state).max() < 2**53
    assert np.array_equal(shipped.of_inputs, np.floor(shipped.of_inputs / unit) * unit)
    largest = np.abs(shipped.of_output).sum(axis=1) * network.STATE_ONE + np.abs(shipped.of_output_offset)
    terms = np.array([1, 1, 1, LIMIT / 4, LIMIT / 4, LIMIT**2 / 16])
    of_plan = largest[network.OUTPUTS :].reshape(-1, len(terms), network.OUTPUTS)
    assert np.max(terms @ of_plan, initial=0.0) * 2**11 < 2**53


def test_table_entries_are_not_near_a_rounding_boundary() -> None:
    """tanh may differ in its last bits between machines; no entry is close enough to 0.5 to be rounded otherwise."""
    values = [math.tanh(i / 2**10) for i in range(-(2**13), 2**13 + 1) if i]
    values += [0.5 + 0.5 * math.tanh(0.5 * i / 2**10) for i in range(-(2**13), 2**13 + 1) if i]
    distances = [abs((value * network.STATE_ONE) % 1 - 0.5) for value in values]
    assert min(distances) > 1e-9


def test_shipped_weights_are_those_of_the_calibration() -> None:
    """The files of the weights have the hashes that they had when thresholds and figures were measured."""
    folder = resources.files("evalstop_detectors.posterior")
    for name, expected in (
        ("network.int16", "53ac427333c5ea6f55879b87f4b002de2fb9a273fac29f64b8645567832a7262"),
        ("paired.int16", "cac8f532d5cf7e179534b15ddf0a495e761a187a9a3b90c671b9774cea893545"),
    ):
        assert hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() == expected


def test_clear_turn_is_found_and_rise_is_not() -> None:
    """A run that falls in its second half gets a probability above 0.95; a rise stays below 0.3."""
    rise = [1 - math.exp(-step / 8) for step in range(60)]
    turn = [*rise[:30], *(rise[29] - 0.03 * step for step in range(1, 31))]
    noise = [0.01 * ((7 * step) % 5 - 2) for step in range(60)]
    healthy = run_detector([a + b for a, b in zip(rise, noise, strict=True)], planned=60)
    turning = run_detector([a + b for a, b in zip(turn, noise, strict=True)], planned=60)
    assert max(healthy) < 0.3
    assert max(turning[:30]) < 0.3
    assert turning[-2] > 0.95


def test_same_fall_counts_more_late_in_the_plan() -> None:
    """The probability is higher where the fall lasts to the end of the plan."""
    scores = [min(step, 30.0) - 0.3 * max(0, step - 30) for step in range(40)]
    nearly_over, unknown = (run_detector(scores, planned)[-1] for planned in (44, None))
    assert nearly_over > unknown


@given(scores=st.lists(st.floats(-5, 5), min_size=3, max_size=30), planned=st.integers(3, 2000))
def test_plan_never_makes_a_turn_less_likely(scores: list[float], planned: int) -> None:
    """With any plan the probability is at least what it is without one, at each eval."""
    detector = Posterior()
    with_plan, without = (run_detector(scores, length, detector) for length in (planned, None))
    assert all(a >= b for a, b in zip(with_plan, without, strict=True))


def test_note_says_that_a_plan_is_doubted() -> None:
    """A fall that is deep and long counts under a plan of which it is a small part, and the note says why."""
    detector, state = Posterior(), Posterior().start()
    for step in range(60):
        score = min(step, 20) - 0.5 * max(0, step - 20) + 0.1 * ((7 * step) % 5)
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score, progress=(step + 1) / 5000))
    assert evidence.value > 0.95
    assert evidence.note.endswith("length of the run not used")


def test_overrun_plan_is_ignored() -> None:
    """From the planned end on, an eval counts as in a run of unknown length."""
    detector, state = Posterior(), Posterior().start()
    for step in range(20):
        state, _ = detector.step(state, Observation(MetricRole.EVAL, step, math.sqrt(step), progress=step / 20))
    overrun, _ = detector.step(state, Observation(MetricRole.EVAL, 20, 4.0, progress=1.0))
    unknown, _ = detector.step(state, Observation(MetricRole.EVAL, 20, 4.0))
    assert (overrun.hidden, overrun.evidence.value) == (unknown.hidden, unknown.evidence.value)
    assert overrun.evidence.note.endswith("length of the run reached")


def test_covered_share_is_one_without_a_gain_to_come() -> None:
    """The covered share of the final range is that of the range to come, at most all of it."""
    outputs = np.array([0.0, 0.0, -0.5, 0.0, 1.0])
    assert network.to_outlook(outputs, outputs[:1], (0.0, 0.0)).covered == 0.5
    outputs[4] = -0.1
    assert network.to_outlook(outputs, outputs[:1], (0.0, 0.0)).covered == 1.0


def test_plateau_is_reported_as_levelled_off() -> None:
    """The outlook is below 0.8 on a rise and at least 0.9 on a long plateau, where its note says so."""
    detector, state = Posterior(), Posterior().start()
    outlook_values = []
    for step in range(100):
        score = min(step, 30) + 0.1 * ((7 * step) % 5 - 2)
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score, progress=step / 100))
        if evidence.outlook is not None:
            outlook_values.append(evidence.outlook.value)
    assert outlook_values[10] < 0.8
    assert outlook_values[-2] >= 0.9
    assert evidence.outlook is not None
    assert evidence.outlook.note == "0 % to 4 % of the range so far may still be gained (10 to 90 % quantile)"
