"""Applies messages to the state of a run. Pure: takes what was loaded, returns what to save.

Outside the event loop's thread a replay pauses between slices, see `ingest.monitor_moves`; its result is the same.

apply(state, messages, facts, now) -> Applied    some of the messages, in order; the rest are applied next time
                                   -> Needs      the first message needs facts; nothing has been applied
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter

import msgspec
from evalstop_detectors import MetricRole, Observation, find_request, is_late
from msgspec.structs import replace

from evalstop_service.errors import Conflict, NotFound, QuotaReached, ServiceError
from evalstop_service.ingest.combined_evals import (
    NO_SCORES,
    NewScores,
    add_values,
    combine_anew,
    name_fallen_evals,
    needs_of_evals,
    needs_of_reason,
    refuse_own_scores,
)
from evalstop_service.ingest.facts import NOTHING_NEEDED, Facts, Needs
from evalstop_service.ingest.messages import (
    Answer,
    CheckpointSaved,
    Content,
    EvalAnswered,
    EvalChanged,
    Message,
    Observations,
    Receipt,
    Resumed,
    RolesCorrected,
)
from evalstop_service.ingest.monitor_moves import advance_monitor, replay_monitor, rewind_monitor
from evalstop_service.ingest.new_observations import compare_with_stored, find_new_names, sort_observations
from evalstop_service.ingest.receipts import write_receipt
from evalstop_service.ingest.row_changes import add_evals, settle_row
from evalstop_service.ingest.run_state import KEEP_EVERY, RunState, with_eval_changes, with_roles
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.eval_changes import MOST_CHANGES, EvalChange, add_change, carry_into_attempt
from evalstop_service.rules.quotas import LEAST_METRICS, Quota
from evalstop_service.rules.role_recognition import COMBINED_METRIC
from evalstop_service.rules.run_results import Call
from evalstop_service.rules.statuses import OPEN, RunStatus
from evalstop_service.runs import metric_roles
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run, RunChanges


class Applied(msgspec.Struct):
    """Messages applied to a run: what to save, and the answers to give once it is saved.

    `points`: new ones, of which `late` are not past the last step of their metric. `content`: of the last message, if
    it has consequences: rows other than the run's and the observations', see `ingest.consequences`. `decision`: on the
    current attempt, as far as it was loaded. `settles_case`: evals or checkpoints arrived after the run's end.
    `scores`: of several combined evals, where stored scores are replaced.
    """

    before: RunState
    state: RunState
    answers: list[Answer]
    points: list[PostedObservation] = []
    late: list[PostedObservation] = []
    content: Content | None = None
    decision: Decision | None = None
    settles_case: bool = False
    scores: NewScores = NO_SCORES

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to save."""
        return self.state.run is not self.before.run


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
    try:
        refuse_pruned_run(state.run)
        match message.content:
            case Observations():
                return _apply_observations(state, message.content, facts, version, now)
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


def _apply_observations(
    before: RunState, content: Observations, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Store new observations, and advance the monitor and the best checkpoint.

    1. Find the new observations. One past the last step of its metric is new; any other has to be looked up.
    2. If the quota of metrics is exceeded, nothing of the batch is stored.
    3. A metric's first appearance may change the roles, and with them what the detectors see of the past.
    4. Step the detectors. For a late observation or changed roles, replay them from before it or from the beginning.
    5. Add new evals to the scores; for a late one, rebuild the scores. Several evals are combined first.
    6. Update the row, and determine whether other rows follow from it.
    """
    run, state = before.run, before
    names = find_new_names(state, content.points) if metric_roles.is_open(run) else None
    fresh, doubtful, last_steps = sort_observations(state, content.points)
    needs = _needs_of_decision(state)
    quota_applies = len(last_steps) > max(LEAST_METRICS, len(state.last_steps))
    if doubtful or names is not None or quota_applies:
        identities = frozenset(point.identity for point in doubtful)
        needs |= Needs(identities, role_patterns=names is not None, metrics_quota=quota_applies)
    if not facts.meet(needs):
        return facts.needs | needs
    if quota_applies and len(last_steps) > facts.metrics_quota:
        raise QuotaReached(Quota.METRICS_PER_RUN, facts.metrics_quota)
    late, conflicts = compare_with_stored(fresh, doubtful, facts.values)
    fresh += late

    if names is not None:
        state = with_roles(state, metric_roles.assign_roles(names, run.labels, facts.role_patterns))
    recast = state.watch is not before.watch
    watched_points, combined = fresh, NO_SCORES
    if state.watch.combined:
        refuse_own_scores(state, content.points)
        needs |= needs_of_evals(state, fresh)
        if not facts.meet(needs):
            return facts.needs | needs
        state, combined = add_values(state, facts, fresh)
        facts, watched_points = combined.drop_outdated(facts), [*fresh, *combined.points]
        if combined.points:
            last_steps[COMBINED_METRIC] = combined.points[-1].step
    observations = state.watch.observations(watched_points)
    replayed = recast or (bool(observations) and is_late(state.monitor, observations[0]))
    if replayed:
        state = rewind_monitor(state, None if recast else observations[0])
    eval_metric = state.watch.eval_metric
    evals = sorted([point for point in watched_points if point.metric == eval_metric], key=_STEP)
    scores = None if recast else state.usable_scores
    late_eval = bool(evals) and scores is not None and evals[0].step <= scores.last_step
    if late_eval:
        scores = None
    scored = recast or bool(evals)
    ended = run.ended_at is not None and run.status != RunStatus.LOST
    needs |= _needs_of_past(state, replayed=replayed, rescored=scored and scores is None, turned=scored and ended)
    if not facts.meet(needs):
        return facts.needs | needs

    decision = state.final_decision or facts.decision
    duplicates = len(content.points) - len(fresh) - len(conflicts)
    if not fresh and not state.unrecorded:
        return Applied(before, before, [write_receipt(before, decision, 0, duplicates, conflicts)], decision=decision)
    if replayed:
        state = replay_monitor(state, facts.points, watched_points)
    elif observations:
        state = advance_monitor(state, observations)
    fallen = None
    if state.watch.combined:
        needs |= needs_of_reason(before, state)
        if not facts.meet(needs):
            return facts.needs | needs
        fallen = name_fallen_evals(before, state, [*facts.points, *fresh])
    changes = RunChanges()
    if scored:
        state, changes = add_evals(state, scores, facts, evals, turned=ended)
    if fresh:
        state = replace(state, last_steps=last_steps)
        changes["last_step"] = max(run.last_step or 0, *map(_STEP, fresh))
    state = settle_row(state, changes, version, now, rewritten=replayed or late_eval, fallen=fallen)
    on_hold = decision is not None and decision.state == DecisionState.ON_HOLD
    moves = on_hold or (decision is not None and decision.is_recovered(state.run.verdict))
    is_replaced = combined.first_step is not None
    follows = bool(late) or is_replaced or (scored and (ended or moves)) or _has_consequences(before, state)
    if not follows and state.unrecorded:
        state = replace(state, unrecorded=())
    receipt = write_receipt(state, decision, len(fresh), duplicates, conflicts)
    return Applied(
        before,
        state,
        [receipt],
        fresh if is_replaced else watched_points,
        late,
        content if follows else None,
        decision,
        settles_case=scored and ended,
        scores=combined,
    )


def _apply_answer(
    before: RunState, content: EvalAnswered, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Store the difference found by a paired evaluation, and judge the run with it. Raises Conflict.

    The answer is an observation at the step of the request, usually a late one.
    """
    if content.attempt != before.run.attempt:
        raise Conflict(f"the request is of attempt {content.attempt}, but the run is in attempt {before.run.attempt}")
    applied = _apply_observations(before, Observations((content.point,)), facts, version, now)
    if isinstance(applied, Applied) and applied.points:
        applied.content = content
    return applied


def _apply_checkpoint(
    before: RunState, content: CheckpointSaved, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Add a checkpoint unless it is known, and choose the best one again. Raises Conflict if its address differs."""
    run, scores = before.run, before.usable_scores
    needs = _needs_of_decision(before) | Needs(checkpoints=scores is None)
    ended = run.ended_at is not None and run.status != RunStatus.LOST
    needs |= _needs_of_past(before, rescored=scores is None, turned=ended)
    if not facts.meet(needs):
        return facts.needs | needs
    decision = facts.decision if before.final_decision is None else before.final_decision
    uris = scores.uris if scores is not None else {item.step: item.uri for item in facts.checkpoints}
    uri = uris.get(content.step)
    if uri is not None and uri != content.uri:
        raise Conflict(f"the checkpoint of step {content.step} is already stored at {uri!r}; its address cannot change")
    if uri is not None:
        return Applied(before, before, [Receipt(run, decision, created=False)], decision=decision)
    checkpoint = Checkpoint(content.step, content.uri, run.attempt, now)
    state, changes = add_evals(before, scores, facts, [], [checkpoint], turned=ended)
    state = settle_row(state, changes, version, now)
    receipt = Receipt(state.run, decision)
    return Applied(before, state, [receipt], [], [], content, decision, settles_case=ended)


def _apply_resumption(before: RunState, content: Resumed, facts: Facts, version: int, now: datetime) -> Applied | Needs:
    """Begin a new attempt at a step unless it was already begun there: observations past the step no longer count."""
    run = before.run
    eval_changes = carry_into_attempt(run.eval_changes, content.step)
    state = rewind_monitor(replace(with_eval_changes(before, eval_changes), combined=None), None)
    needs = _needs_of_decision(before) | Needs(resumed_at=content.step)
    needs |= _needs_of_past(state, replayed=True, rescored=True) | needs_of_evals(state, None)
    if not facts.meet(needs):
        return facts.needs | needs
    decision = facts.decision if before.final_decision is None else before.final_decision
    if run.status == RunStatus.RUNNING and facts.attempt_began_at == content.step and facts.attempt_is_empty:
        return Applied(before, before, [Receipt(run, decision)], decision=decision)
    remaining_points = [point for point in facts.points if point.step <= content.step]
    saved = tuple(item for item in facts.checkpoints if item.step <= content.step)
    follows = decision is not None and decision.follows_run
    state = replace(state, has_decision=follows, final_decision=None, last_steps=dict(facts.last_steps))
    state = replay_monitor(state, remaining_points, [])
    fallen = name_fallen_evals(before, state, remaining_points)
    state, changes = add_evals(state, None, replace(facts, points=tuple(remaining_points), checkpoints=saved), [])
    changes |= {
        "attempt": run.attempt + 1,
        "status": run.status if run.status in OPEN else RunStatus.RUNNING,
        "ended_at": None,
        "turn": None,
        "last_step": max(facts.last_steps.values(), default=None),
    }
    state = settle_row(state, changes, version, now, rewritten=True, fallen=fallen)
    return Applied(before, state, [Receipt(state.run, None)], content=content, decision=decision)


def _apply_correction(
    before: RunState, content: RolesCorrected, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Assign the roles that a person gives, and replay the run with them."""
    run, roles = before.run, metric_roles.correct_roles(before.run, content.metrics)
    changed = (run.metrics, run.recognition) != roles
    state = rewind_monitor(with_roles(before, roles, anew=True), None) if changed else before
    ended = run.ended_at is not None and run.status != RunStatus.LOST
    needs = _needs_of_decision(before)
    needs |= _needs_of_past(state, replayed=changed, rescored=changed, turned=changed and ended)
    needs |= needs_of_evals(state, None)
    if not facts.meet(needs):
        return facts.needs | needs
    decision = facts.decision if before.final_decision is None else before.final_decision
    if not changed:
        return Applied(before, before, [Receipt(run, decision)], decision=decision)
    state, combined = combine_anew(state, facts)
    facts = combined.replace_in(facts)
    state = replay_monitor(state, facts.points, [])
    fallen = name_fallen_evals(before, state, facts.points)
    state, changes = add_evals(state, None, facts, [], turned=ended)
    state = settle_row(state, changes, version, now, rewritten=True, fallen=fallen)
    receipt = Receipt(state.run, decision)
    return Applied(before, state, [receipt], content=content, decision=decision, settles_case=ended, scores=combined)


def _apply_eval_change(
    before: RunState, content: EvalChanged, facts: Facts, version: int, now: datetime
) -> Applied | Needs:
    """Add a change of the eval's measurement, and replay the run from its step; known changes have no effect."""
    run = before.run
    change = EvalChange(content.step, content.reason, content.actor, now, content.version)
    changes = add_change(run.eval_changes, change)
    if changes == run.eval_changes:
        return Applied(before, before, [Receipt(run, before.final_decision, created=False)])
    if len(changes) > MOST_CHANGES:
        raise Conflict(f"the eval of run {run.name!r} has changed {MOST_CHANGES} times; no more changes are stored")
    state = with_eval_changes(before, changes)
    first = Observation(MetricRole.KL, content.step, 0.0)  # sorts before every observation of its step
    replayed = is_late(before.monitor, first)
    if replayed:
        state = rewind_monitor(state, first)
    scores = before.usable_scores
    rescored = scores is None or scores.last_step >= content.step
    ended = run.ended_at is not None and run.status != RunStatus.LOST
    needs = _needs_of_decision(before) | _needs_of_past(state, replayed=replayed, rescored=rescored, turned=ended)
    needs |= needs_of_evals(state, None)
    if not facts.meet(needs):
        return facts.needs | needs
    decision = facts.decision if before.final_decision is None else before.final_decision
    state, combined = combine_anew(state, facts, content.step)
    facts = combined.replace_in(facts)
    if replayed:
        state = replay_monitor(state, facts.points, [])
    fallen = name_fallen_evals(before, state, facts.points)
    state, row_changes = add_evals(state, None if rescored else scores, facts, [], turned=ended)
    state = settle_row(state, row_changes, version, now, rewritten=True, fallen=fallen)
    receipt = Receipt(state.run, decision)
    return Applied(before, state, [receipt], content=content, decision=decision, settles_case=ended, scores=combined)


def _needs_of_decision(state: RunState) -> Needs:
    return _DECISION if state.has_decision and state.final_decision is None else NOTHING_NEEDED


def _needs_of_past(state: RunState, *, replayed: bool = False, rescored: bool = False, turned: bool = False) -> Needs:
    """The stored observations that a replay, rebuilt scores or a new change point in hindsight require."""
    if not (replayed or rescored or turned):
        return NOTHING_NEEDED
    series: dict[str, int] = {}
    if replayed:
        series = dict.fromkeys(state.watch.metrics, 0 if state.monitor.last is None else state.monitor.last[0])
    if state.watch.eval_metric is not None and (rescored or turned):
        series[state.watch.eval_metric] = 0
    return Needs(series=tuple(sorted(series.items())), checkpoints=rescored and state.watch.eval_metric is not None)


def _has_consequences(before: RunState, state: RunState) -> bool:
    """Whether more has to be saved than new observations and the columns of the hot statement."""
    run, old = state.run, before.run
    return (
        run.rewritten_version != old.rewritten_version
        or any(Call(verdict.verdict) is not old.verdict.verdict for verdict in state.unrecorded)
        or (state.monitor.verdict.stops and not state.has_decision and run.status == RunStatus.RUNNING)
        or place_of(run) != place_of(old)
        or state.unkept >= KEEP_EVERY
        or run.status != old.status
        or run.recognition is not old.recognition
        or find_request(state.policy, state.monitor) != find_request(before.policy, before.monitor)
    )


def place_of(run: Run) -> tuple[int, str] | None:
    """The step and address of the best checkpoint. Its smoothed score is left out: it changes with every eval."""
    best = run.best_checkpoint
    return (best.step, best.uri) if best else None


_STEP = attrgetter("step")
_DECISION = Needs(decision=True)
