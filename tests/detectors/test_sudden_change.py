"""Entropy and response length as a hint: a sudden change asks for an eval, and never stops a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from evalstop_detectors import POLICIES, ROLES, Call, MetricRole, Observation, replay, start, step
from evalstop_detectors.detectors.sudden_change import SuddenChange

from tests.detectors.strategies import collect_evidence

NOISE = np.exp(0.15 * np.random.default_rng(3).standard_normal(400))


def find_call(detector: SuddenChange, values: list[float]) -> int | None:
    """The index of the first value at which it calls for a suspicion."""
    evidence = collect_evidence(detector, [Observation(detector.role, i, value) for i, value in enumerate(values)])
    return next((i for i, item in enumerate(evidence) if item.reaches(detector.thresholds.suspect_at)), None)


@pytest.mark.parametrize(
    ("role", "course"),
    [
        (MetricRole.ENTROPY, lambda share: math.exp(-12 * share) + 0.03),
        (MetricRole.ENTROPY, lambda share: 1 / (1 + 30 * share)),
        (MetricRole.LENGTH, lambda share: 200 * math.exp(2.5 * share)),
        (MetricRole.LENGTH, lambda share: 300 + 1500 / (1 + math.exp(-(share - 0.5) / 0.15))),
    ],
)
@pytest.mark.parametrize("evals", [40, 400])
def test_healthy_courses_are_left_alone(role: MetricRole, course: object, evals: int) -> None:
    """Entropy that is used up and answers that grow, as in healthy runs, call for nothing, however often logged."""
    assert callable(course)
    values = [course(index / evals) * NOISE[index] for index in range(evals)]
    assert find_call(SuddenChange(role=role), values) is None


@pytest.mark.parametrize("evals", [40, 400])
@pytest.mark.parametrize(("role", "factor"), [("entropy", 0.1), ("entropy", 6.0), ("length", 8.0), ("length", 0.1)])
def test_sudden_change_is_found_within_a_tenth_of_the_run(role: str, factor: float, evals: int) -> None:
    """A collapse or an explosion calls soon after it, however often the metric is logged."""
    at = evals // 2
    values = [NOISE[index] * (factor if index >= at else 1.0) for index in range(evals)]
    call = find_call(SuddenChange(role=MetricRole(role)), values)
    assert call is not None
    assert at < call <= at + evals // 10


def find_shipped(role: MetricRole) -> SuddenChange:
    """The detector of a role, as `default` has it."""
    members = [member.detector for member in POLICIES["default"].members]
    return next(item for item in members if isinstance(item, SuddenChange) and item.role is role)


def test_shipped_policies_watch_every_role_that_may_only_hint() -> None:
    """A role that is declared as a hint has its detector, without a list to keep."""
    roles = {role for role, traits in ROLES.items() if traits.hints}
    assert {find_shipped(role).role for role in roles} == roles


@pytest.mark.parametrize("evals", [80, 400])
def test_gradient_norm_calls_when_it_stays_up_and_not_for_spikes(evals: int) -> None:
    """Single spikes of 50 times, a short burst and a fall call for nothing; a lasting rise does, soon after it."""
    detector, at = find_shipped(MetricRole.GRADIENT_NORM), evals // 2
    spikes = [NOISE[i] * (50 if i % (evals // 8) == 1 else 1) for i in range(evals)]
    burst = [NOISE[i] * (20 if 0 <= i - at < 3 else 1) for i in range(evals)]
    fall = [NOISE[i] * (0.05 if i >= at else 1) for i in range(evals)]
    assert [find_call(detector, values) for values in (spikes, burst, fall)] == [None] * 3
    call = find_call(detector, [NOISE[i] * (8 if i >= at else 1) for i in range(evals)])
    assert call is not None
    assert at < call <= at + evals * 0.15


def test_truncated_share_calls_when_most_answers_are_cut() -> None:
    """A share that moves between 0 and 3 % of the answers calls for nothing, one that jumps to 60 % does."""
    detector = find_shipped(MetricRole.TRUNCATED)
    shares = [0.01 * (i % 4) for i in range(200)]
    assert find_call(detector, shares) is None
    assert find_call(detector, [0.6 if i >= 150 else share for i, share in enumerate(shares)]) is not None
    assert find_call(detector, [0.6 if i < 150 else share for i, share in enumerate(shares)]) is None


@pytest.mark.parametrize("name", ["default", "early", "cautious"])
def test_sudden_changes_raise_a_suspicion_and_never_stop(name: str) -> None:
    """A run whose entropy vanishes is suspect without evidence from the eval, and is not stopped."""
    policy, verdicts = POLICIES[name], set[Call]()
    state = start(policy)
    for index in range(60):
        entropy = 0.5 if index < 40 else 0.01
        state, _ = step(policy, state, Observation(MetricRole.ENTROPY, index, entropy))
        state, verdict = step(policy, state, Observation(MetricRole.EVAL, index, index + 0.3 * (index % 3)))
        verdicts.add(verdict.verdict)
        assert verdict.verdict is Call.CONTINUE or not verdict.rests_on_eval
    assert verdicts == {Call.CONTINUE, Call.SUSPECT}


@pytest.mark.parametrize("name", ["default", "early", "cautious"])
def test_sudden_changes_move_no_stop(name: str) -> None:
    """A run that turns is stopped at the same step with and without these metrics."""
    policy = POLICIES[name]
    evals = [
        Observation(MetricRole.EVAL, i, min(i, 40) - 0.5 * max(0, i - 40) + 0.3 * (i % 3), progress=i / 200)
        for i in range(120)
    ]
    entropies = [Observation(MetricRole.ENTROPY, i, 0.5 if i < 45 else 0.01) for i in range(120)]
    plain, beside = replay(policy, evals).verdict, replay(policy, [*evals, *entropies]).verdict
    assert plain.verdict is Call.STOP
    assert (beside.verdict, beside.step, beside.turn_step) == (plain.verdict, plain.step, plain.turn_step)
