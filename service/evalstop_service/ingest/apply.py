"""Applies messages to the state of a run. Pure: takes what was loaded, returns what to save.

Outside the event loop's thread a replay pauses between slices, see `ingest.monitor_moves`; its result is the same.

apply(state, messages, facts, now) -> Applied    some of the messages, in order; the rest are applied next time
                                   -> Needs      the first message needs facts; nothing has been applied
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from evalstop_detectors import MetricRole, Observation, is_late
from msgspec.structs import replace

from evalstop_service.errors import Conflict, NotFound, ServiceError
from evalstop_service.ingest.applied import Applied
from evalstop_service.ingest.apply_observations import apply_observations
from evalstop_service.ingest.combined_evals import combine_anew, name_fallen_evals, needs_of_evals
from evalstop_service.ingest.facts import Facts, Needs, needs_of_decision, needs_of_past
from evalstop_service.ingest.messages import (
    CheckpointSaved,
    EvalAnswered,
    EvalChanged,
    Message,
    Observations,
    Receipt,
    Resumed,
    RolesCorrected,
)
from evalstop_service.ingest.monitor_moves import replay_monitor, rewind_monitor
from evalstop_service.ingest.row_changes import add_evals, settle_row
from evalstop_service.ingest.run_state import RunState, with_eval_changes, with_roles
from evalstop_service.rules.eval_changes import MOST_CHANGES, EvalChange, add_change, carry_into_attempt
from evalstop_service.rules.statuses import OPEN, RunStatus
from evalstop_service.runs import metric_roles
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.store.checkpoints import Checkpoint


def apply(state: RunState, messages: Sequence[Message], facts: Facts, now: datetime) -> Applied | Needs:
    """Apply messages of one run in order, up to the first that has consequences or needs facts.

    Facts describe saved rows. A message behind unsaved ones that needs facts therefore waits.
    """
    version = state.run.version + 1
    applied = _apply_message(state, messages[0], facts, version, now)
    for message in messages[1:]:
        if isinstance(applied, Needs) or applied.content is not None:
            break
        result = _apply_message(applied.state, message, facts.of_later_messages, version, now)
        if isinstance(result, Needs):
            break
        applied.answers += result.answers
        applied.points += result.points
        result.before, result.answers, result.points = state, applied.answers, applied.points
        applied = result
    return applied


def _apply_message(state: RunState, message: Message, facts: Facts, version: int, now: datetime) -> Applied | Needs:
    if state.run.project_id != message.project_id:
        return Applied(state, state, [not_found(message)])
    if missing := facts.find_missing(needs_of_decision(state)):
        return missing
    if state.final_decision is not None:
        facts = replace(facts, decision=state.final_decision)
    try:
        refuse_pruned_run(state.run)
        match message.content:
            case Observations():
                return apply_observations(state, message.content, facts, version, now)
            case CheckpointSaved():
                return _apply_checkpoint(state, message.content, facts, version, now)
            case Resumed():
                return _apply_resumption(state, message.content, facts, version, now)
            case RolesCorrected():
                return _apply_correction(state, message.content, facts, version, now)
            case EvalChanged():
                return _apply_eval_change(state, message.content, facts, version, now)
            case EvalAnswered():
                return _apply_answer(state, message.content, facts, version, now)
    except ServiceError as error:
        return Applied(state, state, [error])


def not_found(message: Message) -> NotFound:
    """The error for a project that has no such run."""
    return NotFound(f"there is no run {message.run_id} in this project; create one with POST /api/v1/runs")


def _apply_answer(
    before: RunState, content: EvalAnswered, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Store the difference found by a paired evaluation, and judge the run with it. Raises Conflict.

    The answer is an observation at the step of the request, usually a late one.
    """
    if content.attempt != before.run.attempt:
        raise Conflict(f"the request is of attempt {content.attempt}, but the run is in attempt {before.run.attempt}")
    applied = apply_observations(before, Observations((content.point,)), facts, version, now)
    if isinstance(applied, Applied) and applied.points:
        applied.content = content
    return applied


def _apply_checkpoint(
    before: RunState, content: CheckpointSaved, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Add a checkpoint unless it is known, and choose the best one again. Raises Conflict if its address differs."""
    scores, ended = before.usable_scores, before.run.has_ended
    needs = Needs(checkpoints=scores is None) | needs_of_past(before, rescored=scores is None, turned=ended)
    if missing := facts.find_missing(needs):
        return missing
    uris = scores.uris if scores is not None else {item.step: item.uri for item in facts.checkpoints}
    uri = uris.get(content.step)
    if uri is not None and uri != content.uri:
        raise Conflict(f"the checkpoint of step {content.step} is already stored at {uri!r}; its address cannot change")
    if uri is not None:
        return _leave_unchanged(before, facts, created=False)
    checkpoint = Checkpoint(content.step, content.uri, before.run.attempt, now)
    state, changes = add_evals(before, scores, facts, [], [checkpoint], turned=ended)
    state = settle_row(state, changes, version, now)
    receipt = Receipt(state.run, facts.decision)
    return Applied(before, state, [receipt], content=content, decision=facts.decision, settles_case=ended)


def _apply_resumption(before: RunState, content: Resumed, facts: Facts, version: int, now: datetime) -> Applied | Needs:
    """Begin a new attempt at a step unless it was already begun there: observations past the step no longer count.

    The first attempt was begun at step 0.
    """
    run = before.run
    eval_changes = carry_into_attempt(run.eval_changes, content.step)
    state = rewind_monitor(replace(with_eval_changes(before, eval_changes), combined=None), None)
    needs = Needs(resumed_at=content.step) | needs_of_past(state, replayed=True, rescored=True)
    if missing := facts.find_missing(needs | needs_of_evals(state, None)):
        return missing
    if run.status in OPEN and (facts.attempt_began_at or 0) == content.step and facts.attempt_is_empty:
        return _leave_unchanged(before, facts)
    decision = facts.decision
    facts = replace(
        facts,
        points=tuple(point for point in facts.points if point.step <= content.step),
        checkpoints=tuple(item for item in facts.checkpoints if item.step <= content.step),
    )
    follows = decision is not None and decision.follows_run
    state = replace(state, has_decision=follows, final_decision=None, last_steps=dict(facts.last_steps))
    state = replay_monitor(state, facts.points, [])
    fallen = name_fallen_evals(before, state, facts.points)
    state, changes = add_evals(state, None, facts, [])
    changes |= {
        "attempt": run.attempt + 1,
        "status": run.status if run.status in OPEN and follows else RunStatus.RUNNING,
        "ended_at": None,
        "turn": None,
        "last_step": max(facts.last_steps.values(), default=None),
    }
    state = settle_row(state, changes, version, now, rewritten=True, fallen=fallen)
    return Applied(before, state, [Receipt(state.run, None)], content=content, decision=decision)


def _apply_correction(
    before: RunState, content: RolesCorrected, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Assign the roles that a person gives, and judge the run again with them."""
    run, roles = before.run, metric_roles.correct_roles(before.run, content.metrics)
    if (run.metrics, run.recognition) == roles:
        return _leave_unchanged(before, facts)
    state = rewind_monitor(with_roles(before, roles, anew=True), None)
    return _judge_again(before, replace(state, scores=None), content, facts, version, now)


def _apply_eval_change(
    before: RunState, content: EvalChanged, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Add a change of the eval's measurement, and judge the run again from its step; a known one has no effect."""
    run, scores = before.run, before.usable_scores
    change = EvalChange(content.step, content.reason, content.actor, now, content.version)
    changes = add_change(run.eval_changes, change)
    if changes == run.eval_changes:
        return _leave_unchanged(before, facts, created=False)
    if len(changes) > MOST_CHANGES:
        raise Conflict(f"the eval of run {run.name!r} has changed {MOST_CHANGES} times; no more changes are stored")
    state = with_eval_changes(before, changes)
    first = Observation(MetricRole.KL, content.step, 0.0)  # sorts before every observation of its step
    if is_late(before.monitor, first):
        state = rewind_monitor(state, first)
    if scores is not None and scores.last_step >= content.step:
        state = replace(state, scores=None)
    return _judge_again(before, state, content, facts, version, now, content.step)


def _judge_again(
    before: RunState,
    state: RunState,
    content: RolesCorrected | EvalChanged,
    facts: Facts,
    version: int,
    now: datetime,
    first_step: int = 0,
) -> Applied | Needs:
    """Replay the monitor if it was rewound, build the scores again if they were dropped, and update the row.

    `first_step`: from here on several evals are combined again.
    """
    replayed, scores, ended = state.monitor is not before.monitor, state.usable_scores, before.run.has_ended
    needs = needs_of_past(state, replayed=replayed, rescored=scores is None, turned=ended)
    if missing := facts.find_missing(needs | needs_of_evals(state, None)):
        return missing
    state, combined = combine_anew(state, facts, first_step)
    facts = combined.replace_in(facts)
    if replayed:
        state = replay_monitor(state, facts.points, [])
    fallen = name_fallen_evals(before, state, facts.points)
    state, changes = add_evals(combined.pass_failure(state), scores, facts, [], turned=ended)
    state = settle_row(state, changes, version, now, rewritten=True, fallen=fallen)
    return Applied(
        before,
        state,
        [Receipt(state.run, facts.decision)],
        content=content,
        decision=facts.decision,
        settles_case=ended,
        scores=combined,
    )


def _leave_unchanged(state: RunState, facts: Facts, *, created: bool = True) -> Applied:
    """The result of a message that was applied before."""
    return Applied(state, state, [Receipt(state.run, facts.decision, created=created)], decision=facts.decision)
