"""The one function that service, replay and simulator share: observations in, a new state and a verdict out.

`step` takes one observation, `advance` several at once; both are the same loop, and how a run is cut into batches
changes nothing. What most observations do not change is not looked at again: a verdict is judged anew when the evidence
of a member is another object than before, which is why detectors hand out the evidence that still stands as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from evalstop_detectors.detector import Evidence
from evalstop_detectors.errors import OutOfOrder
from evalstop_detectors.observation import RANK, Observation, Signal
from evalstop_detectors.policy import NOTHING_SEEN, Policy, Verdict

_NOTHING = (-sys.maxsize, -1)  # before every step


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
    state, _ = advance(policy, state, (observation,))
    return state, state.verdict


def advance(
    policy: Policy, state: MonitorState, observations: Iterable[Observation]
) -> tuple[MonitorState, list[Verdict]]:
    """Take in observations in their order, as `step` does one by one; raises OutOfOrder at the first that is late.

    The verdicts are those at which the word (`continue`, `suspect`, `stop`) became another, and at the end the last
    one, which is the state's; what came between differs from its neighbors in evidence and step alone.
    """
    shown, needs = policy.shown, policy.min_evals
    states, evidence = list(state.states), list(state.evidence)
    last_step, last_rank = _NOTHING if state.last is None else state.last
    # Until then the verdict depends on more than the evidence: on the step and on how many evals there were.
    settled_from = policy.warmup_steps or _NOTHING[0] + 1
    evals, verdict, suspect_step = state.evals, state.verdict, state.suspect_step
    changes: list[Verdict] = []
    reached = verdict.step
    for observation in observations:
        signal, at = observation.signal, observation.step
        if signal not in shown:
            continue
        rank = RANK[signal]
        if at < last_step or (at == last_step and rank <= last_rank):
            raise OutOfOrder(
                f"{signal} at step {at} belongs before an observation that the monitor has already seen; replay the run"
                " in step order"
            )
        stale = last_step < settled_from or evals < needs
        last_step, last_rank = at, rank
        for index, take in shown[signal]:
            states[index], found = take(states[index], observation)
            if found is not evidence[index]:
                evidence[index], stale = found, True
        if signal is Signal.EVAL and observation.finite:
            evals += 1
        if verdict.stops:
            continue
        reached = at
        if stale:
            before, verdict = verdict.verdict, policy.judge(evidence, at, evals)
            if verdict.verdict is not before:
                changes.append(verdict)
                if suspect_step is None:
                    suspect_step = at
    if verdict.step != reached:
        verdict = Verdict(verdict.verdict, reached, verdict.turn_step, verdict.reason, verdict.evidence)
    if not changes or changes[-1] is not verdict:
        changes.append(verdict)
    last = None if last_step == _NOTHING[0] else (last_step, last_rank)
    return MonitorState(tuple(states), tuple(evidence), last, evals, verdict, suspect_step), changes


def replay(policy: Policy, observations: Iterable[Observation]) -> MonitorState:
    """The state after a whole run, given in any order; each (signal, step) may occur once."""
    state, _ = advance(policy, start(policy), sorted(observations, key=lambda item: item.order))
    return state
