"""Paired evaluations on request: when the posterior asks for them, and the effect of an answer or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest
from evalstop_detectors import (
    POLICIES,
    Call,
    EvalRequests,
    MetricRole,
    Observation,
    Policy,
    Verdict,
    find_request,
    start,
    step,
)
from evalstop_detectors.detectors.posterior import HELD_EVALS, Posterior
from evalstop_detectors.posterior import network, paired
from evalstop_detectors.posterior.features import LIMIT, FeatureState
from evalstop_detectors.posterior.paired import Answer, describe_answer, describe_effect
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import collect_evidence

ASKING = Posterior(requests=EvalRequests(at=0.3))
NOISY_FALL = [min(index, 30.0) - 0.3 * max(0, index - 30) + 4 * math.sin(7 * index * index) for index in range(45)]


def build_observations(scores: list[float]) -> list[Observation]:
    """Evals of a run with 80 planned steps."""
    return [Observation(MetricRole.EVAL, index, score, progress=index / 80) for index, score in enumerate(scores)]


def answer_first_request(scores: list[float], difference: float, stderr: float = 0.5) -> tuple[float, float]:
    """The probability at the first request of a run, and after this answer to it."""
    state = ASKING.start()
    for item in build_observations(scores):
        state, evidence = ASKING.step(state, item)
        if ASKING.find_open_request(state):
            break
    _, after = ASKING.step(state, Observation(MetricRole.PAIRED, item.step, difference, stderr, item.progress))
    return evidence.value, after.value


def test_answer_moves_the_probability() -> None:
    """A confirmed fall raises the probability by a bounded amount, and an answer of no difference lowers it."""
    before, after_fall = answer_first_request(NOISY_FALL, -8.0)
    _, after_no_difference = answer_first_request(NOISY_FALL, 0.0)
    assert after_no_difference < before < after_fall
    log_odds = [math.log(p / (1 - p)) for p in (before, after_fall)]
    assert log_odds[1] - log_odds[0] <= paired.MOST + 1e-3


def judge_with_answers(
    policy: Policy, scores: Sequence[float], find_difference: Callable[[int], float], stderr: float
) -> tuple[list[Verdict], list[int]]:
    """The verdict after each eval and its answer, and the steps that were asked about."""
    state, verdicts, asked = start(policy), list[Verdict](), list[int]()
    for index, score in enumerate(scores):
        state, _ = step(policy, state, Observation(MetricRole.EVAL, index, score))
        if find_request(policy, state) is not None:
            asked.append(index)
            state, _ = step(policy, state, Observation(MetricRole.PAIRED, index, find_difference(index), stderr))
        verdicts.append(state.verdict)
    return verdicts, asked


def draw_sudden_fall(size: float, evals: int = 120) -> list[float]:
    """A rise by 1 over 50 evals, then a fall at once, with noise of 0.08."""
    noise = 0.08 * np.random.default_rng(5).standard_normal(evals)
    return [min(index / 50, 1.0) ** 0.7 - (size if index >= 50 else 0.0) + noise[index] for index in range(evals)]


@pytest.mark.parametrize("size", [0.7, 1.5])
@pytest.mark.parametrize("name", ["default", "early", "cautious"])
def test_consistent_answers_are_certain_of_a_sudden_fall(name: str, size: float) -> None:
    """Up to three answers of 28 standard errors stop a run that fell at once, which the network alone doubts."""
    policy = POLICIES[name].with_evaluator(0.0)
    verdicts, asked = judge_with_answers(policy, draw_sudden_fall(size), lambda index: -size, size / 28)
    evals = next(index for index, verdict in enumerate(verdicts) if verdict.stops)
    assert len(asked) <= 3
    assert evals <= 50 + (6 if name != "cautious" else 15)


@pytest.mark.parametrize("size", [0.7, 1.5])
@pytest.mark.parametrize("name", ["default", "early", "cautious"])
def test_answer_of_no_fall_clears_a_changed_grader(name: str, size: float) -> None:
    """The suspicion goes with the answer, the run is not stopped at its new level, and a later decline is."""
    policy = POLICIES[name].with_evaluator(0.0)
    scores = draw_sudden_fall(size)
    verdicts, asked = judge_with_answers(policy, scores, lambda index: 0.0, 0.025)
    assert 51 in asked
    assert verdicts[51].verdict is Call.CONTINUE
    assert not any(verdict.stops for verdict in verdicts)
    falling = [*scores[:90], *(scores[89] - 0.1 * index for index in range(1, 40))]
    verdicts, _ = judge_with_answers(policy, falling, lambda index: min(0.0, 0.1 * (89 - index)), 0.025)
    assert any(verdict.stops for verdict in verdicts)


def test_new_best_discards_earlier_answers() -> None:
    """After a new best the evidence equals that of a run without an answer."""
    scores = [*NOISY_FALL, *(40.0 + index for index in range(12))]
    plain = build_observations(scores)
    with_answer = collect_evidence(
        Posterior(), [*plain[:45], Observation(MetricRole.PAIRED, 44, -20.0, 0.1), *plain[45:]]
    )
    assert with_answer[45].value > collect_evidence(Posterior(), plain)[44].value
    assert with_answer[-1].value == collect_evidence(Posterior(), plain)[-1].value


@given(
    scores=st.lists(st.floats(-100, 100), min_size=5, max_size=40),
    at=st.sampled_from([1e-6, 0.01, 0.3]),
    most=st.integers(1, 4),
)
def test_unanswered_request_changes_little(scores: list[float], at: float, most: int) -> None:
    """Without an answer the evidence equals that without requests, except at evals where a sudden fall is held."""
    without_requests = collect_evidence(Posterior(), build_observations(scores))
    with_requests = collect_evidence(Posterior(requests=EvalRequests(at=at, most=most)), build_observations(scores))
    held = [(a.value, b.value) for a, b in zip(without_requests, with_requests, strict=True) if a != b]
    assert len(held) <= most * HELD_EVALS
    assert all(b == at < a for a, b in held)


def test_sudden_fall_is_held_for_at_most_two_evals() -> None:
    """After a sudden fall the value is held below the threshold for up to two evals while an answer is awaited."""
    scores = [math.sqrt(index) + 0.02 * ((7 * index) % 5) for index in range(30)] + [
        3.2 + 0.02 * ((7 * index) % 5) for index in range(20)
    ]
    without_requests = [item.value for item in collect_evidence(Posterior(), build_observations(scores))]
    with_requests = [item.value for item in collect_evidence(ASKING, build_observations(scores))]
    held = [index for index, (a, b) in enumerate(zip(without_requests, with_requests, strict=True)) if a != b]
    assert 1 <= len(held) <= HELD_EVALS
    assert without_requests[held[-1] + 1 :] == with_requests[held[-1] + 1 :]


def test_deep_sudden_fall_is_asked_about_whatever_the_probability() -> None:
    """When half of the gain is lost at once, an evaluation is asked for at the second eval, also if the proxy fell."""
    scores = [math.sqrt(index) + 0.02 * ((7 * index) % 5) for index in range(30)] + [1.0] * 5
    detector = Posterior(requests=EvalRequests(at=0.999))

    def find_request_steps(proxy_fall: float) -> set[int]:
        state, steps = detector.start(), set[int]()
        for item in build_observations(scores):
            proxy = item.step + 0.1 * (item.step % 2) - (proxy_fall if item.step >= 30 else 0.0)
            state, _ = detector.step(state, Observation(MetricRole.PROXY, item.step, proxy))
            state, _ = detector.step(state, item)
            request = detector.find_open_request(state)
            steps |= {request.step} if request is not None else set()
        return steps

    assert find_request_steps(proxy_fall=0) == {31}
    assert find_request_steps(proxy_fall=20) == {31}


def test_requests_are_limited_and_spaced() -> None:
    """The next request needs an answer to the last and 1.6 times as long below the best; 3 requests at most."""
    state, request_steps = ASKING.start(), list[int]()
    for item in build_observations([min(index, 30.0) - 0.2 * max(0, index - 30) for index in range(80)]):
        state, _ = ASKING.step(state, item)
        request = ASKING.find_open_request(state)
        if request is not None:
            request_steps.append(request.step)
            assert (request.step, request.number, request.multiplier) == (item.step, len(request_steps), 4)
            state, _ = ASKING.step(state, Observation(MetricRole.PAIRED, item.step, -0.1, 1.0))
            assert ASKING.find_open_request(state) is None
    assert len(request_steps) == 3
    assert all(later - 30 >= 1.6 * (earlier - 30) - 2 for earlier, later in pairwise(request_steps))


@pytest.mark.parametrize(
    ("share", "progress", "affordable"), [(0.0, None, True), (0.02, 0.0, False), (0.01, 0.1, True), (0.01, 0.3, False)]
)
def test_request_costs_at_most_a_tenth_of_the_rest(share: float, progress: float | None, affordable: bool) -> None:
    """A request costs 8 evals, which must be at most a tenth of the rest; without a plan the whole run counts."""
    assert EvalRequests(eval_share=share).are_affordable(progress) is affordable


def test_policy_asks_only_with_an_evaluator() -> None:
    """`early` requests evaluations only for runs with an evaluator; `paper` never does."""
    assert POLICIES["paper"].with_evaluator(0.0) is POLICIES["paper"]
    policy = POLICIES["early"].with_evaluator(0.0)
    assert policy is POLICIES["early"].with_evaluator(0.0)
    requests = []
    for judging_policy in (policy, POLICIES["early"]):
        state = start(judging_policy)
        for item in build_observations(NOISY_FALL):
            state, _ = step(judging_policy, state, item)
            requests.append(find_request(judging_policy, state))
    assert any(requests[: len(NOISY_FALL)])
    assert not any(requests[len(NOISY_FALL) :])


def test_layer_sums_stay_below_2_to_53() -> None:
    """The largest possible sum of the shipped layer is exact in float64."""
    data = resources.files("evalstop_detectors.posterior").joinpath("paired.int16").read_bytes()
    inner, offset, outer, last = paired.decode_layer(data)
    largest = np.abs(inner).sum(axis=1).max() * LIMIT * network.STATE_ONE + np.abs(offset).max()
    assert largest < 2**53
    assert np.abs(outer).sum() * network.STATE_ONE + abs(last) < 2**53


@pytest.mark.parametrize(
    ("added", "words"),
    [
        (3.0, "a paired evaluation multiplies the odds by 20"),
        (0.6, "a paired evaluation multiplies the odds by 1.8"),
        (-2.0, "a paired evaluation divides the odds by 7.4"),
        (-8.0, "a paired evaluation divides the odds by 2981"),
        (0.04, "a paired evaluation hardly changes the odds"),
        (-1e-9, "a paired evaluation hardly changes the odds"),
    ],
)
def test_effect_of_an_answer_is_worded_for_every_size(added: float, words: str) -> None:
    """The note says by which factor an answer changes the odds, if by any."""
    assert describe_effect(added) == words


def test_answer_about_a_subnormal_range_has_finite_features() -> None:
    """The standard error is then infinitely many times as large as the range."""
    run = FeatureState(evals=3, best=2e-313, low=0.0, level=0.0, since=1.0)
    assert np.isfinite(describe_answer(run, Answer(0.0, 1.0, 2e-313, 1.0))).all()
