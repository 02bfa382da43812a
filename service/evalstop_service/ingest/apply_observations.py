"""Applies posted observations to the state of a run. Pure, see `ingest.apply`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple

from evalstop_detectors import is_late
from msgspec.structs import replace

from evalstop_service.ingest.applied import Applied, has_consequences
from evalstop_service.ingest.combined_evals import (
    NO_SCORES,
    NewScores,
    add_values,
    name_fallen_evals,
    needs_of_evals,
    needs_of_reason,
    refuse_own_scores,
)
from evalstop_service.ingest.facts import Facts, Needs, needs_of_past
from evalstop_service.ingest.messages import Observations
from evalstop_service.ingest.monitor_moves import advance_monitor, replay_monitor, rewind_monitor
from evalstop_service.ingest.new_observations import NewObservations, find_new
from evalstop_service.ingest.receipts import write_receipt
from evalstop_service.ingest.row_changes import add_evals, settle_row
from evalstop_service.ingest.run_state import RunState, Scores, describe_failure, with_roles
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.runs import metric_roles
from evalstop_service.runs.metric_roles import RoleAssignment
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run, RunChanges


class _Scoring(NamedTuple):
    """New evals by ascending step, and the scores that they are added to; None: the scores are built again.

    `is_late`: an eval is not past the last one.
    """

    evals: list[PostedObservation]
    scores: Scores | None
    is_late: bool


def apply_observations(
    before: RunState, content: Observations, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Store new observations, and advance the monitor and the best checkpoint.

    1. Find the new observations.
    2. Assign roles to new metrics, and combine several evals into one score, which is treated as the eval from here on.
    3. Step the detectors. For a late observation or changed roles, replay them from before it or from the beginning.
    4. Add new evals to the scores. For a late one or changed roles, build the scores again.
    5. Update the row, and determine whether other rows follow from it.
    """
    new = find_new(before, content.points, facts)
    if isinstance(new, Needs):
        return new
    extended = _extend_state(before, content, new, facts)
    if isinstance(extended, Needs):
        return extended
    state, points, combined = extended
    facts = combined.drop_outdated(facts)
    duplicates = len(content.points) - len(new.points) - len(new.conflicts)
    if not new.points and not state.unrecorded:
        receipt = write_receipt(before, facts.decision, 0, duplicates, new.conflicts)
        return Applied(before, before, [receipt], decision=facts.decision)

    scoring, ended = _find_scoring(before, state, points), before.run.has_ended
    stepped = _step_detectors(before, state, points, facts, scoring)
    if isinstance(stepped, Needs):
        return stepped
    state, replayed = stepped
    fallen = None
    if state.watch.combined:
        if missing := facts.find_missing(needs_of_reason(before, state)):
            return missing
        fallen = name_fallen_evals(before, state, [*facts.points, *new.points])
    changes = RunChanges()
    if scoring is not None:
        state, changes = add_evals(state, scoring.scores, facts, scoring.evals, turned=ended)
    if new.points:
        changes["last_step"] = max(before.run.last_step or 0, *map(_STEP, new.points))
    state = combined.pass_failure(state)
    rewritten = replayed or (scoring is not None and scoring.is_late)
    state = settle_row(state, changes, version, now, rewritten=rewritten, fallen=fallen)

    is_replaced = combined.first_step is not None
    follows = bool(new.late) or is_replaced or has_consequences(before, state)
    follows = follows or (scoring is not None and (ended or _may_move(facts.decision, state)))
    if not follows and state.unrecorded:
        state = replace(state, unrecorded=())
    return Applied(
        before,
        state,
        [write_receipt(state, facts.decision, len(new.points), duplicates, new.conflicts)],
        new.points if is_replaced else points,
        new.late,
        content if follows else None,
        facts.decision,
        settles_case=scoring is not None and ended,
        scores=combined,
    )


def _extend_state(
    before: RunState, content: Observations, new: NewObservations, facts: Facts
) -> tuple[RunState, list[PostedObservation], NewScores] | Needs:
    """The state with the roles and last steps after these observations; they and the scores that they combine to."""
    state = before
    if new.names is not None:
        state = with_roles(before, _assign_roles(before.run, new.names, facts))
    if new.points:
        state = replace(state, last_steps=new.last_steps)
    if not state.watch.combined:
        return state, new.points, NO_SCORES
    refuse_own_scores(state, content.points)
    if missing := facts.find_missing(needs_of_evals(state, new.points)):
        return missing
    state, combined = add_values(state, facts, new.points)
    return state, [*new.points, *combined.points], combined


def _assign_roles(run: Run, names: Collection[str], facts: Facts) -> RoleAssignment:
    """The roles of metrics with these names; if an error prevents that, those that the run has."""
    try:
        return metric_roles.assign_roles(names, run.labels, facts.role_patterns)
    except Exception as error:
        return metric_roles.keep_roles(run, describe_failure(run, metric_roles.ASSIGNMENT_FAILED, error))


def _find_scoring(before: RunState, state: RunState, points: Sequence[PostedObservation]) -> _Scoring | None:
    """How the scores change; None: not at all."""
    recast, eval_metric = state.watch is not before.watch, state.watch.eval_metric
    evals = [point for point in points if point.metric == eval_metric]
    if not (evals or recast):
        return None
    evals.sort(key=_STEP)
    is_late = bool(evals) and evals[0].step <= before.last_steps.get(evals[0].metric, -1)
    return _Scoring(evals, None if recast or is_late else state.usable_scores, is_late)


def _step_detectors(
    before: RunState, state: RunState, points: Sequence[PostedObservation], facts: Facts, scoring: _Scoring | None
) -> tuple[RunState, bool] | Needs:
    """The state with the monitor after these observations, and whether it was replayed."""
    recast = state.watch is not before.watch
    observations = state.watch.observations(points)
    replayed = recast or (bool(observations) and is_late(state.monitor, observations[0]))
    if replayed:
        state = rewind_monitor(state, None if recast else observations[0])
    if replayed or scoring is not None:
        rescored = scoring is not None and scoring.scores is None
        turned = scoring is not None and before.run.has_ended
        if missing := facts.find_missing(needs_of_past(state, replayed=replayed, rescored=rescored, turned=turned)):
            return missing
    if replayed:
        return replay_monitor(state, facts.points, points), True
    return advance_monitor(state, observations) if observations else state, False


def _may_move(decision: Decision | None, state: RunState) -> bool:
    """Whether a new eval may change the decision: a stop on hold may be sent, a parked run may return."""
    on_hold = decision is not None and decision.state == DecisionState.ON_HOLD
    return on_hold or (decision is not None and decision.is_recovered(state.run.verdict))


_STEP = attrgetter("step")
