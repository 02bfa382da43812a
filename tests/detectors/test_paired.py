"""Paired evaluations: when they are asked for, what an answer does to the probability, and what no answer does."""

from __future__ import annotations

import hashlib
import math
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest
from evalstop_detectors import (
    POLICIES,
    EvalRequests,
    Evidence,
    InvalidPolicy,
    MetricRole,
    Observation,
    find_request,
    policy_from_document,
    start,
    step,
)
from evalstop_detectors.detectors.posterior import HELD_EVALS, Posterior
from evalstop_detectors.posterior import network, paired
from evalstop_detectors.posterior.arithmetic import MANY, ONE
from evalstop_detectors.posterior.features import LIMIT, FeatureState, Given, advance
from evalstop_detectors.posterior.paired import Answer, describe_answer, log_certificate, raise_bets
from hypothesis import given
from hypothesis import strategies as st

ASKING = Posterior(requests=EvalRequests(at=0.3))
NOISY_FALL = [min(at, 30.0) - 0.3 * max(0, at - 30) + 4 * math.sin(7 * at * at) for at in range(45)]


def observed(scores: list[float]) -> list[Observation]:
    return [Observation(MetricRole.EVAL, at, score, progress=at / 80) for at, score in enumerate(scores)]


def follow(detector: Posterior, observations: list[Observation]) -> list[Evidence]:
    state, found = detector.start(), []
    for item in observations:
        state, evidence = detector.step(state, item)
        found.append(evidence)
    return found


def answered(scores: list[float], difference: float, stderr: float = 0.5) -> tuple[float, float]:
    """The probability at the first request of a run, and after this answer."""
    state = ASKING.start()
    for item in observed(scores):
        state, evidence = ASKING.step(state, item)
        if ASKING.find_open_request(state):
            break
    _, after = ASKING.step(state, Observation(MetricRole.PAIRED, item.step, difference, stderr, item.progress))
    return evidence.value, after.value


def test_an_answer_moves_the_probability_its_way() -> None:
    """A confirmed fall makes a turn more likely, no difference makes it less likely, and neither decides alone."""
    before, fell = answered(NOISY_FALL, -8.0)
    _, stood = answered(NOISY_FALL, 0.0)
    assert stood < before < fell
    log_odds = [math.log(p / (1 - p)) for p in (before, fell)]
    assert log_odds[1] - log_odds[0] <= paired.MOST + 1e-3


def test_a_new_best_makes_answers_of_before_worthless() -> None:
    """Once the run is at a new best, it is judged as one that never had an answer."""
    healed = [*NOISY_FALL, *(40.0 + at for at in range(12))]
    plain = observed(healed)
    asked = follow(Posterior(), [*plain[:45], Observation(MetricRole.PAIRED, 44, -20.0, 0.1), *plain[45:]])
    assert asked[45].value > follow(Posterior(), plain)[44].value
    assert asked[-1].value == follow(Posterior(), plain)[-1].value


@given(
    scores=st.lists(st.floats(-100, 100), min_size=5, max_size=40),
    at=st.sampled_from([1e-6, 0.01, 0.3]),
    most=st.integers(1, 4),
)
def test_a_request_that_nobody_answers_changes_nothing(scores: list[float], at: float, most: int) -> None:
    """Evidence is that of a detector that never asks, but for the evals at which a sudden fall is held."""
    silent = follow(Posterior(), observed(scores))
    asking = follow(Posterior(requests=EvalRequests(at=at, most=most)), observed(scores))
    held = [(a.value, b.value) for a, b in zip(silent, asking, strict=True) if a != b]
    assert len(held) <= most * HELD_EVALS
    assert all(b == at < a for a, b in held)


def test_a_sudden_fall_is_held_for_two_evals_at_the_most() -> None:
    """While the answer is awaited a fall that came all at once calls for no stop; then it does, answered or not."""
    scores = [math.sqrt(at) + 0.02 * ((7 * at) % 5) for at in range(30)] + [
        1.0 + 0.02 * ((7 * at) % 5) for at in range(20)
    ]
    silent = [item.value for item in follow(Posterior(), observed(scores))]
    asking = [item.value for item in follow(ASKING, observed(scores))]
    held = [index for index, (a, b) in enumerate(zip(silent, asking, strict=True)) if a != b]
    assert 1 <= len(held) <= HELD_EVALS
    assert silent[held[-1] + 1 :] == asking[held[-1] + 1 :]


def test_requests_are_few_and_lie_apart() -> None:
    """It asks again once the last is answered and the run has been below its best 1.6 times as long, and not often."""
    state, asked = ASKING.start(), list[int]()
    for item in observed([min(at, 30.0) - 0.2 * max(0, at - 30) for at in range(80)]):
        state, _ = ASKING.step(state, item)
        request = ASKING.find_open_request(state)
        if request is not None:
            asked.append(request.step)
            assert (request.step, request.number, request.multiplier) == (item.step, len(asked), 4)
            state, _ = ASKING.step(state, Observation(MetricRole.PAIRED, item.step, -0.1, 1.0))
            assert ASKING.find_open_request(state) is None
    assert len(asked) == 3
    assert all(later - 30 >= 1.6 * (earlier - 30) - 2 for earlier, later in pairwise(asked))


@pytest.mark.parametrize(
    ("share", "progress", "affordable"), [(0.0, None, True), (0.02, 0.0, False), (0.01, 0.1, True), (0.01, 0.3, False)]
)
def test_it_asks_for_no_more_than_a_tenth_of_what_is_left(
    share: float, progress: float | None, affordable: bool
) -> None:
    """Two evaluations of four times the prompts cost eight evals; without a plan all of the run is left."""
    assert EvalRequests(eval_share=share).are_affordable(progress) is affordable


def test_a_policy_asks_only_where_somebody_can_answer() -> None:
    """`early` asks nobody until it is told that a run's checkpoints are evaluated on request; `paper` never asks."""
    assert POLICIES["paper"].with_evaluator(0.0) is POLICIES["paper"]
    policy = POLICIES["early"].with_evaluator(0.0)
    assert policy is POLICIES["early"].with_evaluator(0.0)
    seen = []
    for judge in (policy, POLICIES["early"]):
        state = start(judge)
        for item in observed(NOISY_FALL):
            state, _ = step(judge, state, item)
            seen.append(find_request(judge, state))
    assert any(seen[: len(NOISY_FALL)])
    assert not any(seen[len(NOISY_FALL) :])


def test_a_policy_says_when_it_asks() -> None:
    """The key is read with its defaults, and a bad value is refused with what may stand there."""
    members = [{"detector": "posterior"}]
    read = policy_from_document({"name": "a", "members": members, "evaluate_now": {"most": 1}})
    assert read.evaluate_now == EvalRequests(most=1)
    with pytest.raises(InvalidPolicy, match=r"evaluate_now\.most"):
        policy_from_document({"name": "a", "members": members, "evaluate_now": {"most": 0}})


@given(
    falls=st.lists(
        st.tuples(st.floats(-5, 5), st.floats(0, 5), st.floats(-5, 5), st.integers(1, 9)), min_size=2, max_size=4
    ),
    scores=st.lists(st.lists(st.floats(-5, 5), min_size=12, max_size=12), min_size=4, max_size=4),
)
def test_answers_of_one_run_and_of_many_are_the_same_bits(
    falls: list[tuple[float, float, float, int]], scores: list[list[float]]
) -> None:
    """Plain floats and numpy's arrays describe an answer alike."""
    count = len(falls)
    columns = np.array([[float(item) for item in row] for row in zip(*falls, strict=True)])
    together, states = FeatureState(), [FeatureState() for _ in falls]
    zero = np.zeros(count)
    for at in range(12):
        rows = np.array([scores[index][at] for index in range(count)])
        together, _ = advance(MANY, together, Given(rows, *(zero,) * 8))
        for index in range(count):
            states[index], _ = advance(ONE, states[index], Given(scores[index][at], *(0.0,) * 8))
    with np.errstate(over="ignore"):
        of_many = describe_answer(MANY, together, Answer(columns[0], columns[1], columns[2], columns[3], zero, zero))
    for index, (fall, stderr, curve_fall, since) in enumerate(falls):
        one = describe_answer(ONE, states[index], Answer(fall, stderr, curve_fall, float(since)))
        assert [float(np.broadcast_to(item, (count,))[index]) for item in of_many] == one


def test_no_sum_of_the_layer_leaves_the_whole_numbers() -> None:
    """The file is the one that was shipped, and its largest sum stays far below 2^53."""
    data = resources.files("evalstop_detectors.posterior").joinpath("gru-1.paired.int16").read_bytes()
    assert hashlib.sha256(data).hexdigest() in paired.HASHES.values()
    inner, offset, outer, last = paired.decode_layer(data)
    largest = np.abs(inner).sum(axis=1).max() * LIMIT * network.STATE_ONE + np.abs(offset).max()
    assert largest < 2**53
    assert np.abs(outer).sum() * network.STATE_ONE + abs(last) < 2**53


def test_the_certificate_is_the_mean_of_four_bets() -> None:
    """One answer two standard errors below the negligible: the mean of exp(2 b - b^2/2)."""
    bets = raise_bets((), fall=0.25, stderr=0.1, gain=1.0)
    expected = np.mean([math.exp(2 * b - b * b / 2) for b in paired.BETS])
    assert log_certificate(bets) == pytest.approx(math.log10(expected))
    assert log_certificate(()) == 0.0
