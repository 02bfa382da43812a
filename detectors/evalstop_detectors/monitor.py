"""The one function that service, replay and simulator share: one observation in, a new state and a verdict out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from evalstop_detectors.detector import Evidence
from evalstop_detectors.errors import OutOfOrder
from evalstop_detectors.observation import Observation, Signal
from evalstop_detectors.policy import NOTHING_SEEN, Call, Policy, Verdict


class MonitorState(Struct, frozen=True):
    """All that a run's past means to its future.

    `states` and `evidence` hold one entry a member of the policy. `last` is the `order` of the latest observation.
    `evals` counts finite evals. `suspect_step` is the first step at which the verdict was more than `continue`.
    Once the verdict is `stop` it stays as it was reached, while the detectors go on taking in evidence.
    """

    states: tuple[Any, ...]
    evidence: tuple[Evidence | None, ...]
    last: tuple[int, int] | None = None
    evals: int = 0
    verdict: Verdict = NOTHING_SEEN
    suspect_step: int | None = None


def start(policy: Policy) -> MonitorState:
    """The state of a run of which nothing is known yet."""
    return MonitorState(tuple(m.detector.start() for m in policy.members), (None,) * len(policy.members))


def is_late(state: MonitorState, observation: Observation) -> bool:
    """Whether the observation belongs at or before one that the monitor has already taken in."""
    return state.last is not None and observation.order <= state.last


def step(policy: Policy, state: MonitorState, observation: Observation) -> tuple[MonitorState, Verdict]:
    """Take in one observation; raises OutOfOrder if it is late.

    A signal outside `policy.signals` changes nothing, not even the step of the verdict, however often it comes.
    """
    if observation.signal not in policy.signals:
        return state, state.verdict
    if is_late(state, observation):
        raise OutOfOrder(
            f"{observation.signal} at step {observation.step} belongs before an observation that the monitor has"
            " already seen; replay the run in step order"
        )
    states, evidence = list(state.states), list(state.evidence)
    for index in policy.watching[observation.signal]:
        states[index], evidence[index] = policy.members[index].detector.step(states[index], observation)
    evals = state.evals + (observation.signal is Signal.EVAL and observation.finite)
    verdict, suspect_step = state.verdict, state.suspect_step
    if not verdict.stops:
        verdict = policy.judge(evidence, observation.step, evals)
        if suspect_step is None and verdict.verdict is not Call.CONTINUE:
            suspect_step = observation.step
    return MonitorState(tuple(states), tuple(evidence), observation.order, evals, verdict, suspect_step), verdict


def replay(policy: Policy, observations: Iterable[Observation]) -> MonitorState:
    """The state after a whole run, given in any order; each (signal, step) may occur once."""
    state = start(policy)
    for observation in sorted(observations, key=lambda item: item.order):
        state, _ = step(policy, state, observation)
    return state
