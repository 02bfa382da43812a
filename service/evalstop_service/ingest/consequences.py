"""Consequences: decisions, events, checkpoints and other rows that follow from a message, in its transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from evalstop_detectors import Kind, MonitorState, Verdict, state_to_json
from msgspec.structs import replace

from evalstop_service.decisions import commands, transitions
from evalstop_service.domain.decision_events import GuardsChecked, Recovered, Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.run import COMBINED_METRIC, Call
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.evaluation import cases
from evalstop_service.ingest.changes import Changes, place_of
from evalstop_service.ingest.messages import (
    CheckpointSaved,
    EvalAnswered,
    EvalChanged,
    Exploited,
    Receipt,
    Resumed,
    RolesCorrected,
)
from evalstop_service.ingest.run_state import RunState
from evalstop_service.runs.watched_metrics import record_verdict
from evalstop_service.store import audit, decisions, ingest, observations, projects, run_details, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.ids import new_id
from evalstop_service.store.ingest import StoredMonitorState
from evalstop_service.store.run_details import Checkpoint, EvalRequest
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events

OPEN_FOR = timedelta(hours=6)
"""After this nobody is asked for a paired evaluation any more. A later answer is still accepted."""


def carry_out(
    tx: Transaction, changes: Changes, now: datetime, read_time: Callable[[Transaction], datetime]
) -> Changes:
    """Write the consequences of a run's messages, whose observations were saved in this transaction.

    1. The rows of an edit itself: a checkpoint, an attempt, an entry in the audit log; and a stored monitor.
    2. If the run was not running, its liveness is checked again. If it was lost and its stop has become moot, it can be
       stopped again.
    3. A first call for a stop becomes a decision; the guards of a stop on hold are rechecked on a new eval. A run that
       was or is to be parked and has recovered continues, in a new attempt in which it may be parked again.
    4. The case of an ended run is updated when evals arrived after its end.
    5. What the monitor asks to evaluate now becomes a request.
    6. Changes of the verdict and the best checkpoint are recorded and announced.

    `read_time`: the time of decisions. Returns the changes with the results: the decision in the last receipt, and the
    state to cache.
    """
    before, state, decision = changes.before, changes.state, changes.before.decision
    run, superseded = state.run, 0
    runs.save_changes(tx, before.run, run)
    if isinstance(changes.content, Resumed | Exploited):
        superseded = _begin_attempt(tx, before.run, run, changes.content, now)
        decision = transitions.carry_decision(tx, run)
    _save_content(tx, changes, now)
    _save_scores(tx, changes, now)
    state = _keep_monitor(tx, changes.kept, state)

    if run.status == RunStatus.RUNNING != before.run.status:
        run_details.start_checks(tx, run.id, run.project_id, now, now)
        if run.attempt == before.run.attempt:
            run = transitions.continue_lost_run(tx, run, now)
            if run.attempt != before.run.attempt:
                runs.save_run(tx, run)
                state, decision = replace(state, run=run), None
    if decision is not None and decision.is_recovered(run.verdict):
        decision = decisions.lock_decision(tx, run.id, decision.id)  # a person may have vetoed it since it was read
        if decision.is_recovered(run.verdict):
            run, decision = _return_run(tx, run, decision, now), None
            state = replace(state, run=run)
    if state.monitor.verdict.stops and run.status == RunStatus.RUNNING:
        decision = _withdraw_ruled(tx, run, decision, now)
        if decision is None:
            assert state.monitor.verdict.step is not None, "a stop verdict has a step"
            decision = transitions.create_decision(tx, run, state.monitor.verdict.step, read_time(tx))
        elif decision.state == DecisionState.ON_HOLD:
            locked = decisions.lock_decision(tx, run.id, decision.id)
            decision = transitions.recheck_guards(tx, run, locked, read_time(tx))
    if changes.settles_case and run.ended_at is not None:
        cases.record_case(tx, run, now)
    raised = _raise_request(tx, before, state, now)
    request = _find_open_request(state, raised or changes.request)
    _announce_changes(tx, before.run, run, changes.reached, raised, now)

    answers = changes.answers
    if isinstance(answers[-1], Receipt):
        outcome = {"decision": decision, "superseded": superseded, "eval_request": request}
        answers = [*answers[:-1], replace(answers[-1], **outcome)]
    return replace(changes, state=replace(state, decision=decision), answers=answers)


def _save_content(tx: Transaction, changes: Changes, now: datetime) -> None:
    """Write the rows of the message itself, and to the audit log who changed the run."""
    before, run = changes.before.run, changes.state.run

    def audit_change(actor: str, action: str, details: dict[str, Any]) -> None:
        audit.record_action(tx, run.project_id, actor, action, f"run {run.name}", details, now)

    match changes.content:
        case CheckpointSaved(step, uri):
            run_details.add_checkpoint(tx, run.id, Checkpoint(step, uri, run.attempt, now))
        case Resumed(step, actor):
            audit_change(actor, "run.resumed", {"step": step, "attempt": run.attempt})
        case Exploited(decision_id, actor):
            audit_change(actor, "run.exploited", {"decision": str(decision_id), "attempt": run.attempt})
        case RolesCorrected(metrics, actor):
            audit_change(actor, "run.metrics_changed", {"before": before.metrics, "after": metrics})
        case EvalChanged(step, reason, version, actor):
            audit_change(actor, "run.eval_changed", {"step": step, "reason": reason, "version": version})
        case EvalAnswered() as answer:
            _save_answer(tx, changes.state, answer, now)


def _save_scores(tx: Transaction, changes: Changes, now: datetime) -> None:
    """Replace stored scores of several combined evals."""
    run, first_step = changes.state.run, changes.scores.first_step
    if first_step is not None:
        observations.replace_series(tx, run, COMBINED_METRIC, first_step, changes.scores.points, now)


def _keep_monitor(tx: Transaction, kept: MonitorState | None, state: RunState) -> RunState:
    """Store the monitor that an edit kept, or that of the state if the stored one lacks too much."""
    monitor = kept or (state.monitor if state.keeps_monitor else None)
    if monitor is None:
        return state
    stored = StoredMonitorState(state.run.version, state_to_json(state.policy, monitor).decode())
    ingest.save_state(tx, state.run.id, stored)
    return state if kept is not None else replace(state, unsaved=0)


def _begin_attempt(tx: Transaction, before: Run, run: Run, content: Resumed | Exploited, now: datetime) -> int:
    """Supersede what was observed after the step; returns the number of observations."""
    if isinstance(content, Exploited):
        locked = decisions.lock_decision(tx, run.id, content.decision_id)
        made = Reported(now, DecisionState.CONFIRMED, content.actor, "the trainer has made the copy", {})
        copy = transitions.move_decision(tx, before, locked, made).exploit
        assert copy is not None, "the decision is to copy a run"
        step = copy.source_step
    else:
        step = content.step
    transitions.leave_attempt(tx, before, step, now)
    superseded = observations.supersede(tx, run.id, step, run.attempt)
    runs.add_attempt(tx, run.id, run.attempt, step, now)
    return superseded


def _withdraw_ruled(tx: Transaction, run: Run, decision: Decision | None, now: datetime) -> Decision | None:
    """The decision, unless it is on hold and that of the rule of a group: what holds the rule does not hold the
    policy."""
    if decision is None or decision.group is None or decision.state is not DecisionState.ON_HOLD:
        return decision
    locked = decisions.lock_decision(tx, run.id, decision.id)
    if locked.state is DecisionState.ON_HOLD:
        transitions.move_decision(tx, run, locked, GuardsChecked(now, (), False, "the policy calls for a stop itself"))
    return decisions.find_decision_of_attempt(tx, run.id, run.attempt)


def _return_run(tx: Transaction, run: Run, decision: Decision, now: datetime) -> Run:
    """Take back the stop that parks a run, which is locked. The run is then in a new attempt, with the version of this
    save."""
    actor = f"policy {run.policy_name} version {run.policy_version}"
    reason = f"the eval has recovered: {'; '.join(item.note for item in run.verdict.evidence)}"
    moved = transitions.move_decision(tx, run, decision, Recovered(now, actor, reason))
    returned = commands.unpark_run(tx, run, moved, now)
    resumed = replace(transitions.begin_attempt(tx, returned, now), version=run.version)
    runs.save_run(tx, resumed)
    return resumed


def _announce_changes(
    tx: Transaction, before: Run, run: Run, reached: Sequence[Verdict], raised: EvalRequest | None, now: datetime
) -> None:
    """Record the verdict changes, and announce a first suspicion, a new best checkpoint and a request.

    A suspicion without evidence from the eval metric asks for an eval, which alone can confirm it; a request asks for a
    paired evaluation.
    """
    types = []
    call_before = before.verdict.verdict
    for verdict in reached:
        call = Call(verdict.verdict)
        if call is not call_before:
            call_before = call
            if call is Call.SUSPECT and not run_details.has_reached(tx, run.id, run.attempt, call):
                types.append(EventType.SUSPECTED)
                if not verdict.rests_on_eval and raised is None:
                    types.append(EventType.EVAL_REQUESTED)
            run_details.add_verdict(tx, run.id, run.attempt, record_verdict(verdict), now)
    if raised is not None:
        types.append(EventType.EVAL_REQUESTED)
    if place_of(run) != place_of(before):
        types.append(EventType.BEST_CHECKPOINT_CHANGED)
    if types:
        project = projects.get_project(tx, run.project_id)
        for event_type in types:
            if event_type is EventType.EVAL_REQUESTED:
                events.announce_run_event(tx, event_type, project, run, now, request=raised)
            else:
                events.announce_run_event(tx, event_type, project, run, now)


def _save_answer(tx: Transaction, state: RunState, content: EvalAnswered, now: datetime) -> None:
    """Write the answer, which has become an observation, to its request."""
    request = run_details.find_request(tx, state.run.id, content.request_id)
    if request is None:
        return
    request = replace(
        request,
        answered_at=now,
        actor=content.actor,
        difference=content.point.value,
        stderr=content.point.stderr,
        prompts=content.prompts,
        probability_after=_find_probability(state),
    )
    run_details.save_answer(tx, request)


def _raise_request(tx: Transaction, before: RunState, state: RunState, now: datetime) -> EvalRequest | None:
    """Store what the monitor newly asks for; None: nothing, or there is no checkpoint to compare.

    A replay may ask at another step than the first time: the latest request counts. A new attempt asks again for what
    an earlier one has left unanswered, since an answer counts for its attempt alone.
    """
    policy_request, run = state.requested_eval, state.run
    if policy_request is None or run.status != RunStatus.RUNNING:
        return None
    if policy_request == before.requested_eval and run.attempt == before.run.attempt:
        return None
    best = run.best_checkpoint
    if best is None or best.step >= policy_request.step:
        return None
    request = EvalRequest(
        id=new_id(),
        run_id=run.id,
        project_id=run.project_id,
        attempt=run.attempt,
        step=policy_request.step,
        number=policy_request.number,
        multiplier=policy_request.multiplier,
        best_step=best.step,
        best_uri=best.uri,
        probability=_find_probability(state),
        created_at=now,
        deadline_at=now + OPEN_FOR,
    )
    return request if run_details.add_request(tx, request) else None


def _find_open_request(state: RunState, request: EvalRequest | None) -> EvalRequest | None:
    """The request that waits for an answer, if the monitor still makes the same request."""
    asked, attempt = state.requested_eval, state.run.attempt
    is_open = asked is not None and request is not None and (request.attempt, request.step) == (attempt, asked.step)
    return request if is_open else None


def _find_probability(state: RunState) -> float | None:
    """The probability that the run has turned, from the detector that reports one."""
    deciding = state.monitor.evidence[: len(state.policy.members)]
    posteriors = (item.value for item in deciding if item is not None and item.kind is Kind.POSTERIOR)
    return max(posteriors, default=None)
