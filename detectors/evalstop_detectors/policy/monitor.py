"""The one function that service, replay and simulator share: observations in, a new state and a verdict out.

`step` takes one observation, `advance` several at once, which comes to the same and costs less: each member takes in
all that it is shown of a batch, and then the verdict is judged where the evidence of any became another. How a run is
cut into batches changes nothing. Evidence is another when it is another object, which is why detectors hand out the one
that still stands as it is.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from operator import lt
from typing import Any, NamedTuple

from msgspec import Struct

from evalstop_detectors.detectors.detector import Evidence
from evalstop_detectors.errors import OutOfOrder
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.policy.policy import NOTHING_SEEN, Policy, Verdict

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

    A role outside `policy.roles` changes nothing, not even the step of the verdict, however often it comes.
    """
    role = observation.role
    if role not in policy.roles:
        return state, state.verdict
    order = observation.order
    if state.last is not None and order <= state.last:
        raise _out_of_order(observation)
    states, evidence = list(state.states), list(state.evidence)
    stale = not _is_settled(policy, state.last, state.evals)
    for index, take in policy.shown[role]:
        states[index], found = take(states[index], observation)
        if found is not evidence[index]:
            evidence[index], stale = found, True
    evals = state.evals + (role is MetricRole.EVAL and observation.finite)
    verdict, suspect_step = state.verdict, state.suspect_step
    if not verdict.stops:
        before = verdict
        if stale:
            verdict = policy.judge(evidence, order[0], evals)
            if suspect_step is None and verdict.verdict is not before.verdict:
                suspect_step = order[0]
        elif verdict.step != order[0]:
            verdict = _reached_again(verdict, order[0])
    return MonitorState(tuple(states), tuple(evidence), order, evals, verdict, suspect_step), verdict


def advance(
    policy: Policy, state: MonitorState, observations: Iterable[Observation]
) -> tuple[MonitorState, list[Verdict]]:
    """Take in observations in their order, as `step` does one by one; raises OutOfOrder at the first that is late.

    The verdicts are those at which the word (`continue`, `suspect`, `stop`) became another, and at the end the last
    one, which is the state's; what came between differs from its neighbors in evidence and step alone.
    """
    observations = list(observations)
    if len(observations) == 1:
        state, verdict = step(policy, state, observations[0])
        return state, [verdict]
    seen: list[Observation] = []
    by_role: dict[MetricRole, list[Observation]] = {role: [] for role in policy.roles}
    for observation in observations:
        if (alike := by_role.get(observation.role)) is not None:
            seen.append(observation)
            alike.append(observation)
    if not seen:
        return state, [state.verdict]
    _refuse_late(state, seen)
    states, evidence, news = list(state.states), list(state.evidence), list[_News]()
    for index, (roles, fold) in enumerate(policy.folds):
        if len(roles) == 1:
            shown = by_role[roles[0]]
        else:
            shown = seen if len(roles) == len(by_role) else [item for item in seen if item.role in roles]
        if shown:
            states[index], changes = fold(states[index], evidence[index], shown)
            if changes:
                news += [_News(shown[place].order, index, item) for place, item in changes]
                evidence[index] = changes[-1][1]
    eval_scores = [item for item in by_role[MetricRole.EVAL] if item.finite]
    verdict, suspect_step, verdicts, last = state.verdict, state.suspect_step, list[Verdict](), seen[-1]
    if (news or not _is_settled(policy, state.last, state.evals)) and not verdict.stops:
        judged = _judged(policy, state, seen, eval_scores, news)
        verdicts = [new for old, new in pairwise([verdict, *judged]) if new.verdict is not old.verdict]
        verdict = judged[-1]
        if suspect_step is None and verdicts:
            suspect_step = verdicts[0].step
    if verdict.step != last.step and not verdict.stops:
        verdict = _reached_again(verdict, last.step)
    if not verdicts or verdicts[-1] is not verdict:
        verdicts.append(verdict)
    evals = state.evals + len(eval_scores)
    return MonitorState(tuple(states), tuple(evidence), last.order, evals, verdict, suspect_step), verdicts


class _News(NamedTuple):
    """From this observation on the evidence of this member is another."""

    order: tuple[int, int]
    member: int
    evidence: Evidence


def _refuse_late(state: MonitorState, seen: Sequence[Observation]) -> None:
    last = _NOTHING if state.last is None else state.last
    steps = [item.step for item in seen]
    if last[0] < steps[0] and all(map(lt, steps, islice(steps, 1, None))):
        return  # as nearly all are, and told sooner
    for item in seen:
        if item.order <= last:
            raise _out_of_order(item)
        last = item.order


def _out_of_order(item: Observation) -> OutOfOrder:
    return OutOfOrder(
        f"{item.role} at step {item.step} belongs before an observation that the monitor has already seen; replay the"
        " run in step order"
    )


def _reached_again(verdict: Verdict, step: int) -> Verdict:
    return Verdict(verdict.verdict, step, verdict.turn_step, verdict.reason, verdict.evidence)


def _judged(
    policy: Policy,
    state: MonitorState,
    seen: Sequence[Observation],
    eval_scores: Sequence[Observation],
    news: list[_News],
) -> list[Verdict]:
    """The verdicts on whatever changes them, in order, up to the first stop; `eval_scores` are the finite evals
    seen."""
    orders = {item.order for item in news} | _unsettled(policy, state, seen)
    eval_orders = [item.order for item in eval_scores]
    evidence, found = list(state.evidence), list[Verdict]()
    coming = sorted(news, reverse=True)
    for order in sorted(orders):
        while coming and coming[-1].order <= order:
            item = coming.pop()
            evidence[item.member] = item.evidence
        evals = state.evals + bisect_right(eval_orders, order)
        found.append(policy.judge(evidence, order[0], evals))
        if found[-1].stops:
            break
    return found


def _is_settled(policy: Policy, last: tuple[int, int] | None, evals: int) -> bool:
    """Whether from here on a verdict depends on evidence alone: not on the step, nor on how many evals there were."""
    return last is not None and last[0] >= policy.warmup_steps and evals >= policy.min_evals


def _unsettled(policy: Policy, state: MonitorState, seen: Sequence[Observation]) -> set[tuple[int, int]]:
    """The observations before which verdicts were not settled."""
    found, last, evals = set[tuple[int, int]](), state.last, state.evals
    for item in seen:
        if _is_settled(policy, last, evals):
            break
        last = item.order
        found.add(last)
        evals += item.role is MetricRole.EVAL and item.finite
    return found


def replay(policy: Policy, observations: Iterable[Observation]) -> MonitorState:
    """The state after a whole run, given in any order; each (role, step) may occur once."""
    state, _ = advance(policy, start(policy), sorted(observations, key=lambda item: item.order))
    return state
