"""The one function that service, replay and simulator share: observations in, a new state and a verdict out.

`step` takes one observation, `advance` several, with the same result at lower cost. How a run is split into
batches makes no difference. Changed evidence is always a new object; detectors return the same object while their
evidence is unchanged.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, pairwise, repeat
from operator import attrgetter, itemgetter, lt
from typing import Any

from msgspec.structs import replace

from evalstop_detectors.detectors.detector import Evidence
from evalstop_detectors.errors import OutOfOrder
from evalstop_detectors.observation import (
    RANK,
    Columns,
    MetricRole,
    Observation,
    Order,
    to_columns,
)
from evalstop_detectors.policy.catalog import Call, Verdict
from evalstop_detectors.policy.opening import Opening, Openings, list_finite_evals
from evalstop_detectors.policy.panel import Calls, PanelState, add_calls, fold_observers, step_observers
from evalstop_detectors.policy.policy import Policy
from evalstop_detectors.policy.state import MonitorState, start, start_anew

Change = tuple[Order, int, Evidence | None]
"""A member's new evidence from this observation on; None: unchanged."""

_FEW = 4  # observations; up to this many it is faster to take them one by one


def step(policy: Policy, state: MonitorState, observation: Observation) -> tuple[MonitorState, Verdict]:
    """Add one observation; raises OutOfOrder if it is late.

    A role outside `policy.roles` changes nothing, not even the step of the verdict.
    """
    role = observation.role
    if role not in policy.roles:
        return state, state.verdict
    if policy.critical:
        return _step_guarded(policy, state, observation)
    order = observation.order
    if state.last is not None and order <= state.last:
        raise _out_of_order(role, order[0])
    changed = observation.eval_version != state.eval_version
    if changed:
        state = start_anew(policy, state, observation.eval_version)
    panel = step_observers(policy, state.panel, observation) if policy.observers else state.panel
    is_eval, opening = role is MetricRole.EVAL and observation.finite, state.opening
    if is_eval:
        opening = opening.add_eval(state.evals, observation.value)
    elif role is MetricRole.LEARNING_RATE:
        opening = opening.add_rate(observation.value)
        if opening is state.opening and not changed and not policy.shows_rates:
            return state, state.verdict  # `last` stays too: the evals before it are not late
    if role not in policy.deciding_roles:
        return replace(state, last=order, panel=panel, opening=opening), state.verdict
    states, evidence = list(state.states), list(state.evidence)
    # While nothing calls for a stop, and the evidence stays, the number of evals changes no verdict.
    may_settle = state.verdict.verdict is not Call.CONTINUE and not _is_settled(policy, state.evals, state.opening)
    stale, calls = changed or may_settle or state.verdict.step is None, panel.calls
    for index, detector_step in policy.shown[role]:
        states[index], latest = detector_step(states[index], observation)
        if latest is not evidence[index]:
            evidence[index], stale = latest, True
            calls = add_calls(policy, calls, index, [(order, latest)])
    if calls is not panel.calls:
        panel = PanelState(panel.states, panel.evidence, calls)
    evals = state.evals + is_eval
    verdict, suspect_step = state.verdict, state.suspect_step
    if not policy.keeps(verdict):
        before = verdict
        if stale:
            verdict = _follow(before, policy.judge(evidence, order[0], evals, opening))
            if suspect_step is None and verdict.verdict is not before.verdict:
                suspect_step = order[0]
        elif verdict.step != order[0] and not verdict.stops:
            verdict = _moved_to(verdict, order[0])
    version = state.eval_version
    return MonitorState(
        tuple(states), tuple(evidence), order, evals, verdict, suspect_step, version, (), panel, opening
    ), verdict


def _step_guarded(policy: Policy, state: MonitorState, observation: Observation) -> tuple[MonitorState, Verdict]:
    """Add one observation of a run with critical evals: each has its own monitor.

    An eval is shown only to its monitor, everything else to all. The first monitor that calls for a stop determines the
    verdict; otherwise it is that of the watched score, unless that is `continue` and another suspects.
    """
    is_shared = observation.role is not MetricRole.EVAL
    guarded = tuple(
        step(policy.guarding if index else policy.unguarded, item, observation)[0]
        if is_shared or observation.critical == index
        else item
        for index, item in enumerate(state.guarded)
    )
    verdict, at = state.verdict, observation.step
    if not policy.keeps(verdict):
        calling = [index for index, item in enumerate(guarded) if item.verdict.verdict is Call.STOP]
        calling += [index for index, item in enumerate(guarded) if item.verdict.verdict is Call.SUSPECT]
        verdict = _follow(verdict, _name_critical(policy, guarded, calling[0] if calling else 0))
        verdict = verdict if verdict.stops or verdict.step == at else _moved_to(verdict, at)
    first, suspect_step = guarded[0], state.suspect_step
    if suspect_step is None and verdict.verdict is not Call.CONTINUE:
        suspect_step = at
    last = observation.order if state.last is None else max(state.last, observation.order)
    return replace(first, last=last, verdict=verdict, suspect_step=suspect_step, guarded=guarded), verdict


def _follow(before: Verdict, judged: Verdict) -> Verdict:
    """The verdict after a new judgment: a stop stays as it was reached until the run may continue."""
    return before if before.stops and judged.verdict is not Call.CONTINUE else judged


def _name_critical(policy: Policy, guarded: Sequence[MonitorState], index: int) -> Verdict:
    verdict = guarded[index].verdict
    if index == 0:
        return verdict
    name = policy.critical[index - 1]
    return replace(verdict, critical=name, reason=f"critical eval {name}: {verdict.reason}")


def advance(
    policy: Policy, state: MonitorState, observations: Iterable[Observation]
) -> tuple[MonitorState, list[Verdict]]:
    """Add observations in order; raises OutOfOrder if one is late.

    Returns the verdicts at which the call (`continue`, `suspect`, `stop`) changed, and last the state's verdict. Those
    in between differ from their neighbors only in evidence and step.

    The published rule on a run that falls from step 2 on:

    >>> from evalstop_detectors import POLICIES
    >>> policy = POLICIES["paper"]
    >>> evals = [Observation(MetricRole.EVAL, step, value) for step, value in enumerate([0.1, 0.4, 0.7, 0.6, 0.5, 0.4])]
    >>> state, verdicts = advance(policy, start(policy), evals)
    >>> [(str(verdict.verdict), verdict.step, verdict.turn_step) for verdict in verdicts]
    [('suspect', 4, 2), ('stop', 5, 2)]
    >>> state.verdict.reason
    'k_decline: 3 consecutive declines of eval, k = 3'
    """
    # 1. Roles that the policy does not watch are dropped first, so that they cost nothing more.
    watched = [item for item in observations if item.role in policy.roles]
    if policy.critical or len(watched) <= _FEW:
        return _step_through(policy, state, watched)
    if watched[-1].eval_version != state.eval_version:
        return advance_parts(policy, state, _split_by_version(watched))
    _check_order(state.last, watched)
    columns = to_columns(watched)
    openings = Openings(state.opening, state.evals, columns)
    shown = [role for role in columns if policy.shows_rates or role is not MetricRole.LEARNING_RATE]
    ends = [order for order in (state.last, openings.last_rate) if order is not None]
    last = max([*ends, *((columns[role].steps[-1], RANK[role]) for role in shown)], default=None)
    panel = fold_observers(policy, state.panel, columns) if policy.observers else state.panel
    deciding = {role: column for role, column in columns.items() if role in policy.deciding_roles}
    if not deciding:
        return replace(state, last=last, panel=panel, opening=openings.last), [state.verdict]
    # 2. Each detector takes in everything new: a verdict never changes what a detector sees.
    states, evidence, changes, calls = _fold_detectors(policy, state, deciding, panel.calls)
    # 3. The verdict is recomputed only where evidence changed, or where the step or the count of evals still matters.
    eval_orders = list_finite_evals(deciding)
    verdict, verdicts = state.verdict, list[Verdict]()
    settled = _is_settled(policy, state.evals, state.opening)
    if (changes or not settled) and not policy.keeps(state.verdict):
        ordered = sorted(changes, key=ORDER)
        judged = judge_changes(policy, state, deciding, openings, eval_orders, list(state.evidence), ordered)
        verdict, verdicts = _follow_calls(policy, state.verdict, judged)
    suspect_step = verdicts[0].step if state.suspect_step is None and verdicts else state.suspect_step
    # 4. A continuing verdict gets the latest step; a stop stays as it was reached.
    last_judged = max(column.steps[-1] for column in deciding.values())
    if verdict.step != last_judged and not verdict.stops:
        verdict = _moved_to(verdict, last_judged)
    if not verdicts or verdicts[-1] is not verdict:
        verdicts.append(verdict)
    evals = state.evals + len(eval_orders)
    version, panel = state.eval_version, PanelState(panel.states, panel.evidence, calls)
    return MonitorState(
        tuple(states), tuple(evidence), last, evals, verdict, suspect_step, version, (), panel, openings.last
    ), verdicts


def _follow_calls(policy: Policy, verdict: Verdict, judged: Iterable[Verdict]) -> tuple[Verdict, list[Verdict]]:
    """The last of these verdicts, or the first final one, and those at which the call changed."""
    changed = []
    for latest in judged:
        if latest.verdict is not verdict.verdict:
            changed.append(latest)
        verdict = latest
        if policy.keeps(verdict):
            break
    return verdict, changed


def advance_parts(
    policy: Policy, state: MonitorState, parts: Iterable[Sequence[Observation]]
) -> tuple[MonitorState, list[Verdict]]:
    """`advance` by each part in turn, with the result of all at once; a part is asked for when the last is done."""
    call, verdicts = state.verdict.verdict, list[Verdict]()
    for part in parts:
        state, reached = advance(policy, state, part)
        for verdict in reached:
            if verdict.verdict is not call:
                call = verdict.verdict
                verdicts.append(verdict)
    return state, _with_last(verdicts, state)


def _with_last(verdicts: list[Verdict], state: MonitorState) -> list[Verdict]:
    return verdicts if verdicts and verdicts[-1] is state.verdict else [*verdicts, state.verdict]


def _split_by_version(observations: Sequence[Observation]) -> Iterator[Sequence[Observation]]:
    """The observations of each version of the eval's measurement, the first of them separately."""
    for _, group in groupby(observations, key=attrgetter("eval_version")):
        of_version = list(group)
        yield of_version[:1]
        yield of_version[1:]


def _step_through(
    policy: Policy, state: MonitorState, observations: Sequence[Observation]
) -> tuple[MonitorState, list[Verdict]]:
    verdicts: list[Verdict] = []
    for observation in observations:
        before = state.verdict.verdict
        state, verdict = step(policy, state, observation)
        if verdict.verdict is not before:
            verdicts.append(verdict)
    return state, _with_last(verdicts, state)


ORDER = itemgetter(0)


def _fold_detectors(
    policy: Policy, state: MonitorState, columns: Columns, calls: Calls
) -> tuple[list[Any], list[Evidence | None], list[Change], Calls]:
    states, evidence, changes = list(state.states), list(state.evidence), list[Change]()
    for index, member in enumerate(policy.members):
        roles = member.roles
        watched = (
            columns
            if len(columns) == len(roles) == len(policy.roles)
            else {role: columns[role] for role in roles if role in columns}
        )
        if not watched:
            continue
        states[index], changed = member.detector.fold(states[index], evidence[index], watched)
        if changed:
            changes += [(order, index, item) for order, item in changed]
            evidence[index] = changed[-1][1]
            calls = add_calls(policy, calls, index, changed)
    return states, evidence, changes, calls


def _check_order(last: Order | None, observations: Sequence[Observation]) -> None:
    orders = [(item.step, RANK[item.role]) for item in observations]
    if last is not None:
        orders.insert(0, last)
    if not all(map(lt, orders, islice(orders, 1, None))):
        step, rank = next(order for before, order in pairwise(orders) if order <= before)
        raise _out_of_order(list(RANK)[rank], step)


def _out_of_order(role: MetricRole, step: int) -> OutOfOrder:
    return OutOfOrder(
        f"{role} at step {step} belongs before an observation that the monitor has already seen; replay the run in step"
        " order"
    )


def _moved_to(verdict: Verdict, step: int) -> Verdict:
    return Verdict(verdict.verdict, step, verdict.turn_step, verdict.reason, verdict.evidence, verdict.critical)


def judge_changes(
    policy: Policy,
    state: MonitorState,
    columns: Columns,
    openings: Openings,
    eval_orders: Sequence[Order],
    evidence: list[Evidence | None],
    changes: Iterable[Change],
) -> Iterator[Verdict]:
    """The verdicts on these columns, in order, wherever they may differ; those between that call for nothing are
    omitted, except the last. `changes` are in order; `evidence` is updated to the returned verdict."""
    verdict, skipped = state.verdict, None
    loud = {member for member, item in enumerate(evidence) if policy.alarms(member, item)}
    unsettled = ((order, -1, None) for order in sorted(_unsettled(policy, state, columns, eval_orders, openings)))
    for order, group in groupby(heapq.merge(changes, unsettled, key=ORDER), key=ORDER):
        for _, member, item in group:
            if item is not None:
                evidence[member] = item
                (loud.add if policy.alarms(member, item) else loud.discard)(member)
        if loud or verdict.verdict is not Call.CONTINUE:
            count = bisect_right(eval_orders, order)
            judged = policy.judge(evidence, order[0], state.evals + count, openings.at(order))
            verdict, skipped = _follow(verdict, judged), None
            yield verdict
        else:
            skipped = order
    if skipped is not None:
        yield policy.judge(evidence, skipped[0], state.evals + bisect_right(eval_orders, skipped))


def _is_settled(policy: Policy, evals: int, opening: Opening) -> bool:
    """Whether from here on a verdict depends only on evidence, not on the number of evals.

    Without an eval the detectors may just have restarted: see `start_anew`.
    """
    return evals >= max(policy.min_evals, 1) and not opening.scores


def _unsettled(
    policy: Policy, state: MonitorState, columns: Columns, eval_orders: Sequence[Order], openings: Openings
) -> set[Order]:
    """The observations before which verdicts were not settled."""
    if _is_settled(policy, state.evals, state.opening):
        return set()
    unsettled = set[Order]()
    for order in heapq.merge(*(zip(column.steps, repeat(RANK[role])) for role, column in columns.items())):
        count = bisect_left(eval_orders, order)
        if _is_settled(policy, state.evals + count, openings.before(order)):
            break
        unsettled.add(order)
    return unsettled


def replay(policy: Policy, observations: Iterable[Observation]) -> MonitorState:
    """The state after a whole run, in any order; each (role, step) may occur once."""
    state, _ = advance(policy, start(policy), sorted(observations, key=lambda item: item.order))
    return state
