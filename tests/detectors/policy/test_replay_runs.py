"""Many runs at once get the verdicts, and the evidence to the last bit, of each one step by step to its first stop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from evalstop_detectors import (
    POLICIES,
    Ground,
    Member,
    MetricRole,
    Observation,
    PastRun,
    Policy,
    Thresholds,
    replay_runs,
    start,
    step,
    to_columns,
)
from evalstop_detectors.detectors.detector import Evidence, fold_steps
from evalstop_detectors.detectors.posterior import Posterior
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import policies, series

ROLES = {MetricRole.EVAL, MetricRole.PROXY, MetricRole.KL}
EITHER = Policy(
    "either",
    (Member(Posterior(), Thresholds(suspect_at=0.05, stop_at=0.3)),),
    stop_on=(Ground.TURNED, Ground.LEVELLED_OFF),
    levelled_off_at=0.3,
    min_evals=4,
)


def step_through(policy: Policy, run: Sequence[Observation]) -> PastRun:
    state = start(policy)
    for item in run:
        state, verdict = step(policy, state, item)
        if verdict.stops:
            break
    return PastRun(state.verdict, state.suspect_step, state.evidence)


@given(policy=policies(), runs=st.lists(series(set(MetricRole), max_size=25), max_size=3))
def test_any_policy_on_any_runs(policy: Policy, runs: list[list[Observation]]) -> None:
    """Whatever the members and the observations are, verdict, first suspicion and evidence are those of the steps."""
    found = replay_runs(policy, [to_columns(run) for run in runs])
    assert list(map(repr, found)) == [repr(step_through(policy, run)) for run in runs]


@st.composite
def walks(draw: st.DrawFn) -> list[Observation]:
    """A run that rises and falls over up to forty steps, with some of the roles, standard errors and a plan."""
    steps, turn = draw(st.integers(1, 40)), draw(st.integers(0, 40))
    noise = st.sampled_from([0.0, 0.0, 0.5, -0.5, 3.0])
    planned = draw(st.none() | st.integers(20, 60))
    known = draw(st.none() | st.sampled_from([0.0, 0.2]))
    run = []
    for at in range(steps):
        level = min(at, 2 * turn - at)
        progress = None if planned is None else at / planned
        values = {MetricRole.KL: 0.1 * at, MetricRole.PROXY: at + draw(noise), MetricRole.EVAL: level + draw(noise)}
        roles = draw(st.sampled_from([[MetricRole.EVAL], [MetricRole.PROXY], list(values)]))
        run += [Observation(role, at, values[role], known, progress) for role in values if role in roles]
    return run


@pytest.mark.parametrize("policy", [POLICIES["default"], POLICIES["reversible"], EITHER], ids=lambda item: item.name)
@given(runs=st.lists(walks(), min_size=1, max_size=6))
def test_runs_that_turn(policy: Policy, runs: list[list[Observation]]) -> None:
    """Runs of unequal lengths that turn, or do not, get the same notes and numbers together as each by itself."""
    assert replay_runs(policy, [to_columns(run) for run in runs]) == [step_through(policy, run) for run in runs]


@given(runs=st.lists(walks() | series(ROLES), min_size=1, max_size=6))
def test_the_posterior_is_the_same_at_every_eval(runs: list[list[Observation]]) -> None:
    """Evidence changes at the same observations into the same words and bits, also of values at the edge of floats."""
    detector = Posterior()
    whole = [run for run in runs if run]
    traces = [list(trace) for trace in detector.trace_runs([to_columns(run) for run in whole])]
    assert traces == [fold_steps(detector, detector.start(), None, run)[1] for run in whole]


def test_long_and_short_runs_are_not_mixed_up() -> None:
    """More runs than are held at once, of many lengths, come back each in its place."""
    runs = [
        [Observation(MetricRole.EVAL, at, float(min(at, length - at))) for at in range(1, length)]
        for length in (1400, 3, 400, 40, 1400, 2, 700)
        for _ in range(30)
    ]
    found = replay_runs(POLICIES["default"], [to_columns(run) for run in runs])
    alone = {length: step_through(POLICIES["default"], run) for length, run in {len(run): run for run in runs}.items()}
    assert found == [alone[len(run)] for run in runs]
    assert any(run.verdict.stops for run in found)
    evidence: list[Evidence | None] = [item for run in found for item in run.evidence]
    assert any(item is not None and item.value > 0 for item in evidence)
