"""The posterior detector: whole numbers, one arithmetic for one run and for many, and what it makes of clear cases."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from evalstop_detectors import DETECTORS, MetricRole, Observation
from evalstop_detectors.detectors.detector import fold_steps
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.observation import to_columns
from evalstop_detectors.posterior import network
from evalstop_detectors.posterior.arithmetic import MANY, ONE
from evalstop_detectors.posterior.features import FEATURES, LIMIT, FeatureState, Given, advance
from hypothesis import given
from hypothesis import strategies as st

EVALS = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -1.0])
SHARES = st.floats(0, 2)
FLAGS = st.sampled_from([0.0, 1.0])
DRAWN = st.builds(Given, EVALS, SHARES, FLAGS, EVALS, FLAGS, SHARES, FLAGS, SHARES, FLAGS)


def observe(scores: list[float], planned: int | None = None) -> list[float]:
    detector = Posterior()
    state, found = detector.start(), []
    for step, score in enumerate(scores):
        progress = None if planned is None else (step + 1) / planned
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score, progress=progress))
        found.append(evidence.value)
    return found


@given(
    drawn=st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from([MetricRole.KL, MetricRole.PROXY, MetricRole.EVAL]),
            EVALS | st.sampled_from([math.nan, math.inf]),
        ),
        unique_by=lambda item: item[:2],
        max_size=30,
    )
)
def test_columns_come_to_what_single_observations_come_to(drawn: list[tuple[int, MetricRole, float]]) -> None:
    """Values of proxy and KL that are taken in together before an eval give the state that they give one by one."""
    detector = Posterior()
    state = detector.start()
    observations = sorted((Observation(role, step, value) for step, role, value in drawn), key=lambda item: item.order)
    one_by_one = fold_steps(detector, state, state.evidence, observations)
    assert detector.fold(state, state.evidence, to_columns(observations)) == one_by_one


@given(runs=st.lists(st.lists(DRAWN, min_size=12, max_size=12), min_size=1, max_size=4))
def test_features_of_one_run_and_of_many_are_the_same_bits(runs: list[list[Given]]) -> None:
    """Plain floats and numpy's arrays give equal features and equal states, eval by eval."""
    states, together = [FeatureState() for _ in runs], FeatureState()
    for evals in zip(*runs, strict=True):
        found = []
        for index, item in enumerate(evals):
            states[index], features = advance(ONE, states[index], item)
            found.append(features)
        columns = Given(*(np.array(column) for column in zip(*evals, strict=True)))
        with np.errstate(over="ignore"):  # a quotient of tiny numbers; features end at LIMIT
            together, of_many = advance(MANY, together, columns)
        stacked = np.array([np.broadcast_to(feature, (len(runs),)) for feature in of_many])
        assert np.array_equal(stacked, np.array(found).T)
        assert np.isfinite(stacked).all()


@given(data=st.data())
def test_one_run_and_many_have_the_same_hidden_state(data: st.DataObject) -> None:
    """The network's whole numbers do not depend on how many runs are evaluated at once."""
    shipped = network.load_network("gru-1")
    values = st.lists(st.floats(-2 * LIMIT, 2 * LIMIT), min_size=FEATURES, max_size=FEATURES)
    rows = np.array(data.draw(st.lists(values, min_size=3, max_size=3)))
    many = np.zeros((network.HIDDEN, 3))
    for _ in range(3):
        many = shipped.step(many, network.round_features(rows.T))
    for index in range(3):
        one = np.zeros(network.HIDDEN)
        for _ in range(3):
            one = shipped.step(one, network.round_features(rows[index]))
        assert np.array_equal(one, many[:, index])
        assert np.array_equal(one, np.floor(one))
        assert np.abs(one).max() <= network.STATE_ONE


def test_no_sum_of_the_network_leaves_the_whole_numbers() -> None:
    """The largest sum that any input can bring about stays far below 2^53, from where float64 rounds."""
    shipped = network.load_network("gru-1")
    largest_feature = LIMIT * network.FEATURE_ONE
    of_features = np.abs(shipped.of_features).sum(axis=1).max() * largest_feature * network.STATE_ONE
    of_state = np.abs(shipped.of_state).sum(axis=1).max() * network.STATE_ONE
    offsets = np.abs(shipped.of_features_offset).max() + np.abs(shipped.of_state_offset).max()
    assert (of_features + of_state + offsets) < 2**53
    assert (of_state + offsets) * network.STATE_ONE < 2**53


def test_no_table_entry_lies_near_a_boundary() -> None:
    """tanh may differ in its last bits between machines; no entry is so near to a half that this could matter."""
    values = [math.tanh(i / 2**10) for i in range(-(2**13), 2**13 + 1) if i]
    values += [0.5 + 0.5 * math.tanh(0.5 * i / 2**10) for i in range(-(2**13), 2**13 + 1) if i]
    distances = [abs((value * network.STATE_ONE) % 1 - 0.5) for value in values]
    assert min(distances) > 1e-9


def test_a_shipped_network_is_what_its_name_says() -> None:
    """Each model's file has the hash that stands beside its name; another name is refused with what there is."""
    for name, expected in network.MODELS.items():
        assert network.load_network(name) is network.load_network(name)
        assert len(expected) == len(hashlib.sha256().hexdigest())
    with pytest.raises(network.UnknownModel, match="gru-1"):
        network.load_network("gru-0")


def test_a_clear_turn_is_found_and_a_rise_is_not() -> None:
    """A run that falls for half of its length is sure to have turned; one that rises never seems so."""
    rise = [1 - math.exp(-step / 8) for step in range(60)]
    turn = [*rise[:30], *(rise[29] - 0.03 * step for step in range(1, 31))]
    wiggle = [0.01 * ((7 * step) % 5 - 2) for step in range(60)]
    healthy = observe([a + b for a, b in zip(rise, wiggle, strict=True)], planned=60)
    turning = observe([a + b for a, b in zip(turn, wiggle, strict=True)], planned=60)
    assert max(healthy) < 0.3
    assert max(turning[:30]) < 0.3
    assert turning[-2] > 0.95


def test_the_length_of_the_run_matters() -> None:
    """The same fall is worth more the larger a part of the plan it lasts."""
    scores = [min(step, 30.0) - 0.5 * max(0, step - 30) + 0.3 * ((7 * step) % 5 - 2) for step in range(40)]
    nearly_over, unknown, just_begun = (observe(scores, planned)[-1] for planned in (44, None, 1000))
    assert nearly_over > unknown > just_begun


def test_a_plan_that_is_overrun_is_none() -> None:
    """From the planned end on an eval counts as one of a run whose length nobody told."""
    detector, state = Posterior(), Posterior().start()
    for step in range(20):
        state, _ = detector.step(state, Observation(MetricRole.EVAL, step, math.sqrt(step), progress=step / 20))
    overrun, _ = detector.step(state, Observation(MetricRole.EVAL, 20, 4.0, progress=1.0))
    unknown, _ = detector.step(state, Observation(MetricRole.EVAL, 20, 4.0))
    assert (overrun.hidden, overrun.evidence) == (unknown.hidden, unknown.evidence)


def test_the_outlook_is_ordered() -> None:
    """Probabilities lie between 0 and 1, and the quantiles of what is to be gained in order from 0 up."""
    detector = Posterior()
    state = detector.start()
    for step in range(20):
        state, _ = detector.step(state, Observation(MetricRole.EVAL, step, math.sqrt(step), progress=step / 100))
    outlook = detector.outlook(state)
    assert 0 <= outlook.turned <= outlook.will_turn <= 1
    assert 0 <= outlook.to_gain[0] <= outlook.to_gain[1] <= outlook.to_gain[2]
    assert outlook.to_gain[2] > 0


def test_a_run_that_has_levelled_off() -> None:
    """On a long plateau next to nothing is to be gained any more, on the way up much is, and it is said in words."""
    detector, state = Posterior(), Posterior().start()
    covered = []
    for step in range(100):
        score = min(step, 30) + 0.1 * ((7 * step) % 5 - 2)
        state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score, progress=step / 100))
        if evidence.outlook is not None:
            covered.append(evidence.outlook.value)
    assert covered[10] < 0.8
    assert covered[-2] >= 0.97
    assert evidence.outlook is not None
    assert evidence.outlook.note == "0 % to 0 % of the range so far may still be gained (10 to 90 % quantile)"


def test_it_is_in_the_catalog() -> None:
    """Policies may name it."""
    assert DETECTORS["posterior"] is Posterior
