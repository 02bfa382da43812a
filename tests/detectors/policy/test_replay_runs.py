"""`replay_runs`: the same verdicts and bits of evidence as each run step by step up to its first stop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import pytest
from evalstop_detectors import (
    POLICIES,
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
from evalstop_detectors.detectors.detector import Evidence
from evalstop_detectors.detectors.posterior import Posterior
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import policies, series

ROLES = {MetricRole.EVAL, MetricRole.PROXY, MetricRole.KL}
EARLY_AND_LATE = Policy(
    "both",
    tuple(Member(Posterior(), Thresholds(suspect_at=0.05, stop_at=level)) for level in (0.3, 0.7)),
    at_least=2,
    min_evals=4,
)


def replay_stepwise(policy: Policy, run: Sequence[Observation]) -> PastRun:
    """The result of stepping through a run up to its first stop."""
    state = start(policy)
    for item in run:
        state, verdict = step(policy, state, item)
        if verdict.stops:
            break
    return PastRun(state.verdict, state.suspect_step, state.evidence)


@given(policy=policies(), runs=st.lists(series(set(MetricRole), max_size=25), max_size=3))
def test_any_policy_gives_the_same_as_stepwise(policy: Policy, runs: list[list[Observation]]) -> None:
    """For any policy and runs, verdict, first suspect step and evidence equal those of stepping."""
    replayed = replay_runs(policy, [to_columns(run) for run in runs])
    assert list(map(repr, replayed)) == [repr(replay_stepwise(policy, run)) for run in runs]


@st.composite
def walks(draw: st.DrawFn) -> list[Observation]:
    """A run of up to 40 steps that rises and falls, with some roles, standard errors and progress."""
    steps, turn = draw(st.integers(1, 40)), draw(st.integers(0, 40))
    noise = st.sampled_from([0.0, 0.0, 0.5, -0.5, 3.0])
    planned = draw(st.none() | st.integers(20, 60))
    stderr = draw(st.none() | st.sampled_from([0.0, 0.2]))
    run = []
    for index in range(steps):
        level = min(index, 2 * turn - index)
        progress = None if planned is None else index / planned
        values = {
            MetricRole.KL: 0.1 * index,
            MetricRole.PROXY: index + draw(noise),
            MetricRole.EVAL: level + draw(noise),
        }
        roles = draw(st.sampled_from([[MetricRole.EVAL], [MetricRole.PROXY], list(values)]))
        run += [Observation(role, index, values[role], stderr, progress) for role in values if role in roles]
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [POLICIES["default"], POLICIES["reversible"], EARLY_AND_LATE], ids=lambda item: item.name
)
@given(runs=st.lists(walks(), min_size=1, max_size=6))
def test_turning_runs_give_the_same_as_stepwise(policy: Policy, runs: list[list[Observation]]) -> None:
    """Runs of different lengths give the same notes and numbers together as one by one."""
    assert replay_runs(policy, [to_columns(run) for run in runs]) == [replay_stepwise(policy, run) for run in runs]


@given(runs=st.lists(walks() | series(ROLES), min_size=1, max_size=6))
def test_posterior_trace_equals_stepwise(runs: list[list[Observation]]) -> None:
    """The trace of many runs has the same bits and notes after each eval, also for extreme values."""
    detector = Posterior()
    whole = [run for run in runs if run]
    for run, trace in zip(whole, detector.trace_runs([to_columns(run) for run in whole]), strict=True):
        worded = [trace.word(place) for place in range(len(trace.orders))]
        assert [item.value for item in worded] == trace.values.tolist()
        changed = [next(group) for _, group in groupby(zip(trace.orders, worded, strict=True), key=itemgetter(1))]
        assert changed == detector.fold_steps(detector.start(), None, run)[1]


@pytest.mark.nightly
@pytest.mark.slow
def test_runs_keep_their_order_across_chunks() -> None:
    """More runs than are processed at once, of different lengths, are returned in their order."""
    runs = [
        [Observation(MetricRole.EVAL, index, float(min(index, length - index))) for index in range(1, length)]
        for length in (1400, 3, 400, 40, 1400, 2, 700)
        for _ in range(30)
    ]
    replayed = replay_runs(POLICIES["default"], [to_columns(run) for run in runs])
    expected = {
        length: replay_stepwise(POLICIES["default"], run) for length, run in {len(run): run for run in runs}.items()
    }
    assert replayed == [expected[len(run)] for run in runs]
    assert any(run.verdict.stops for run in replayed)
    evidence: list[Evidence | None] = [item for run in replayed for item in run.evidence]
    assert any(item is not None and item.value > 0 for item in evidence)
