"""Applies events to the life cycle of a decision: a state machine without I/O, events in, instructions out."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from evalstop_service.domain.decision_changes import (
    RECHECK_SECONDS,
    await_report,
    describe_guards,
    end_decision,
    fail_decision,
    join_reasons,
    list_kinds,
    open_veto_window,
    pending_type,
    put_on_hold,
    request_type,
)
from evalstop_service.domain.decision_events import (
    Announce,
    Cancel,
    Event,
    GuardsChecked,
    GuardsRaised,
    Instruction,
    L,
    Postponed,
    Record,
    Recovered,
    Refuse,
    Released,
    Reported,
    RunEnded,
    RunObeyed,
    RunResumed,
    StopDecided,
    StopOrdered,
    TimePassed,
    Transition,
    Undone,
    Vetoed,
    WindowEnded,
    WindowReopened,
)
from evalstop_service.domain.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    NEXT_STATES,
    OPEN_EXPLOIT,
    RETURNING,
    SERVICE,
    STOPPING,
    Action,
    ActionOfPerson,
    DecisionState,
    GuardKind,
    Lifecycle,
    Mode,
    Timeouts,
)
from evalstop_service.domain.event_types import EventType

PARKED_SECONDS = 7 * 86_400.0
"""When people are reminded of a parked job, and again after the same time."""


def start_lifecycle(begun: L, event: StopDecided | StopOrdered, timeouts: Timeouts) -> Transition[L]:
    """The first state of a decision, which `begun` has not reached yet, and the instructions that follow."""
    if isinstance(event, StopOrdered):
        return _state_reason(*_apply_order(begun, event, timeouts))
    due_at = event.at + timedelta(seconds=timeouts.veto_window_seconds)
    begun = replace(begun, due_at=due_at, action=event.action)
    if event.mode is Mode.SHADOW or event.held_out:
        state = DecisionState.SHADOW if event.mode is Mode.SHADOW else DecisionState.HELD_OUT
        return _state_reason(replace(begun, state=state), [Record(state, event.actor, event.reason, event.draw)])
    if event.guards:
        return _state_reason(*put_on_hold(begun, event.at, event.guards, event.actor, event.reason))
    return _state_reason(*open_veto_window(begun, event.at, event.actor, event.reason, timeouts))


def apply_event(lifecycle: L, event: Event, timeouts: Timeouts) -> Transition[L]:
    """The state after an event, and the instructions that follow; a single `Refuse` where nothing changes."""
    return _state_reason(*_apply(lifecycle, event, timeouts))


def _state_reason(lifecycle: L, instructions: list[Instruction]) -> Transition[L]:
    """The transition with the reason of its last change, and without the guards of a stop that is not on hold."""
    records = [instruction for instruction in instructions if isinstance(instruction, Record)]
    if records:
        guard_kinds = lifecycle.guard_kinds if lifecycle.state is DecisionState.ON_HOLD else []
        lifecycle = replace(lifecycle, state_reason=records[-1].state_reason, guard_kinds=guard_kinds)
    return lifecycle, instructions


def _apply(lifecycle: L, event: Event, timeouts: Timeouts) -> Transition[L]:
    match event:
        case TimePassed():
            return _apply_time(lifecycle, event, timeouts)
        case WindowEnded(at, heard_until):
            if lifecycle.state is not DecisionState.PENDING or heard_until < lifecycle.due_at:
                return lifecycle, []
            # The window ended while no process ran, or the hours were changed since it opened.
            if (opening := timeouts.find_opening(at)) > at:
                return replace(lifecycle, due_at=opening), [Record(lifecycle.state, SERVICE, explain_hours(opening))]
            requested = await_report(lifecycle, DecisionState.REQUESTED, at, timeouts)
            record = Record(requested.state, SERVICE, "the veto window is over")
            return requested, [record, Announce(request_type(lifecycle))]
        case WindowReopened(at, due_at, reason):
            if not lifecycle.is_unsent or lifecycle.state is DecisionState.PENDING:  # its window is open
                return lifecycle, []
            pending = replace(lifecycle, state=DecisionState.PENDING, due_at=due_at, deadline_at=None, escalations=0)
            announced = [Announce(pending_type(pending))] if due_at > at else []
            return pending, [Cancel(reason), Record(pending.state, SERVICE, reason), *announced]
        case GuardsChecked():
            return _apply_guard_check(lifecycle, event, timeouts)
        case GuardsRaised(at, guards):
            if not lifecycle.is_unsent or not guards:
                return lifecycle, []
            on_hold, instructions = put_on_hold(lifecycle, at, guards, SERVICE, join_reasons(guards))
            return on_hold, [Cancel("the decision is on hold"), *instructions]
        case Released():
            return _apply_release(lifecycle, event, timeouts)
        case StopOrdered():
            return _apply_order(lifecycle, event, timeouts)
        case Vetoed():
            return _apply_veto(lifecycle, event)
        case Postponed():
            return _apply_postponement(lifecycle, event, timeouts)
        case Reported():
            return _apply_report(lifecycle, event, timeouts)
        case RunEnded():
            return _apply_run_end(lifecycle, event)
        case RunObeyed():
            return _apply_obedience(lifecycle, event)
        case RunResumed():
            return _apply_resume(lifecycle, event)
        case Undone():
            return _apply_undo(lifecycle, event)
        case Recovered():
            return _apply_recovery(lifecycle, event)


def explain_hours(opening: datetime) -> str:
    """Why a stop waits until then."""
    return f"stops go out within the project's hours only, next at {opening:%Y-%m-%d %H:%M} UTC"


def is_allowed(lifecycle: L, event: Event, timeouts: Timeouts) -> bool:
    """Whether an event would change the decision: people are offered what is allowed, by the same rules."""
    after, instructions = apply_event(lifecycle, event, timeouts)
    return after != lifecycle and not any(isinstance(instruction, Refuse) for instruction in instructions)


def allowed_actions(lifecycle: Lifecycle | None, at: datetime, heard_at: datetime | None) -> list[ActionOfPerson]:
    """What people may do now about the decision on a run's attempt, if there is one, and about the run.

    `heard_at`: when the run last reported; None: it ended.
    """
    if lifecycle is None:
        return [] if heard_at is None else ["stop"]
    commands: list[tuple[ActionOfPerson, Event]] = [("veto", Vetoed(at, "", "")), ("release", Released(at, "", ""))]
    commands.append(("undo", Undone(at, "", "", heard_at)))
    commands += [] if heard_at is None else [("stop", StopOrdered(at, "", ""))]
    return [name for name, command in commands if is_allowed(lifecycle, command, Timeouts(0.0, 0.0))]


def _apply_time(lifecycle: L, event: TimePassed, timeouts: Timeouts) -> Transition[L]:
    overdue = lifecycle.deadline_at is not None and lifecycle.deadline_at <= event.at
    refused = event.refusal is not None and lifecycle.state is not DecisionState.ACKNOWLEDGED
    if overdue and lifecycle.state is DecisionState.PARKED:
        return _remind_of_parked(lifecycle, event.at)
    if not (overdue or refused) or lifecycle.state not in AWAITING_CONFIRMATION:
        return lifecycle, []
    failure = _find_failure(lifecycle, event, refused=refused)
    if failure is not None:
        return fail_decision(lifecycle, event.at, SERVICE, failure, {"escalations": lifecycle.escalations})
    # Repeat the same request first, in case it was lost; then escalate to force.
    escalations = lifecycle.escalations + 1
    action = "requested again" if escalations == 1 else "escalated"
    reason = f"no receiver confirmed in time that the job {_AWAITED[lifecycle.action]} is {action}"
    if lifecycle.action is Action.EXPLOIT:
        reason = "the trainer did not confirm the copy in time: it is asked again"
    lifecycle = replace(lifecycle, escalations=escalations)
    return await_report(lifecycle, DecisionState.ESCALATED, event.at, timeouts), [
        Record(DecisionState.ESCALATED, SERVICE, reason, {"escalations": escalations}),
        Announce(request_type(lifecycle) if escalations == 1 else EventType.STOP_ESCALATED),
    ]


_AWAITED = {Action.STOP: "is gone: the stop", Action.PARK: "is parked: it", Action.EXPLOIT: ""}


def _find_failure(lifecycle: L, event: TimePassed, *, refused: bool) -> str | None:
    """Why an unconfirmed stop is not requested again."""
    if event.attempt_over:  # it might end the current attempt
        return "no receiver reported what became of the job, and the run resumed in a new attempt"
    if lifecycle.action is Action.EXPLOIT:
        return "the trainer did not confirm the copy, even after it was asked again" if lifecycle.escalations else None
    if refused:
        return f"no receiver accepts the request: {event.refusal}"
    if lifecycle.action is Action.PARK and lifecycle.escalations >= 1:  # parking is never forced
        return "no receiver confirmed that the job is parked, even after it was asked again"
    if lifecycle.escalations >= 2:
        return "no receiver confirmed that the job is gone, even after the stop was escalated"
    return None


def _remind_of_parked(lifecycle: L, at: datetime) -> Transition[L]:
    """Remind people of a job parked so long that it may have been forgotten."""
    lifecycle = replace(lifecycle, deadline_at=at + timedelta(seconds=PARKED_SECONDS))
    reason = f"parked for {PARKED_SECONDS / 86_400:.0f} days: have it return, or stop it"
    return lifecycle, [Record(lifecycle.state, SERVICE, reason), Announce(EventType.PARK_OVERDUE)]


def _apply_guard_check(lifecycle: L, event: GuardsChecked, timeouts: Timeouts) -> Transition[L]:
    if lifecycle.state is not DecisionState.ON_HOLD:
        return lifecycle, []
    if event.withdrawn is not None:
        lifecycle, record = end_decision(lifecycle, DecisionState.MOOT, SERVICE, event.withdrawn)
        return lifecycle, [record]
    if event.verdict_stops and not event.guards:
        return open_veto_window(lifecycle, event.at, SERVICE, "no guard holds the stop any longer", timeouts)
    if event.verdict_stops and list_kinds(event.guards) != lifecycle.guard_kinds:
        return put_on_hold(lifecycle, event.at, event.guards, SERVICE, join_reasons(event.guards))
    return replace(lifecycle, deadline_at=event.at + timedelta(seconds=RECHECK_SECONDS)), []


def _apply_release(lifecycle: L, event: Released, timeouts: Timeouts) -> Transition[L]:
    if lifecycle.state in STOPPING or lifecycle.state is DecisionState.PENDING:
        return lifecycle, []
    if lifecycle.state is not DecisionState.ON_HOLD:
        return lifecycle, [Refuse(f"the decision is {lifecycle.state}; only a decision on hold can be released")]
    if GuardKind.PAUSED in list_kinds(event.guards):
        return lifecycle, [Refuse("the decision is on hold and its project is paused; resume the project first")]
    return open_veto_window(lifecycle, event.at, event.actor, event.reason, timeouts, describe_guards(event.guards))


def _apply_order(lifecycle: L, event: StopOrdered, timeouts: Timeouts) -> Transition[L]:
    if lifecycle.action is Action.EXPLOIT:
        return lifecycle, [Refuse("the run is to copy another one; order its stop by itself")]
    if lifecycle.state in AWAITING_CONFIRMATION and lifecycle.action is Action.PARK:
        return lifecycle, [Refuse("the job is being parked; stop the run once it is parked")]
    if lifecycle.state in AWAITING_CONFIRMATION:
        next_step = "unless it is confirmed, it is repeated and then forced"
        return lifecycle, [Refuse(f"the stop is {lifecycle.state} already and was not sent again: {next_step}")]
    if event.paused:
        return lifecycle, [Refuse("the project is paused, so no run is stopped; resume the project first")]
    if DecisionState.REQUESTED not in NEXT_STATES[lifecycle.state]:
        why = "receivers ignore a stop that they have seen before; cancel the job at its scheduler"
        return lifecycle, [Refuse(f"the decision is {lifecycle.state}: {why}")]
    lifecycle = replace(
        lifecycle, due_at=event.at, escalations=0, action=Action.STOP, handed_over_at=None, handed_over_to=None
    )
    return await_report(lifecycle, DecisionState.REQUESTED, event.at, timeouts), [
        Cancel("a person stopped the run at once"),
        Record(DecisionState.REQUESTED, event.actor, event.reason, {"ordered": True}),
        Announce(EventType.STOP_REQUESTED),
    ]


def _apply_veto(lifecycle: L, event: Vetoed) -> Transition[L]:
    if lifecycle.state is DecisionState.VETOED:
        return lifecycle, []
    if not lifecycle.is_vetoable:
        if lifecycle.handed_over_at is not None:
            handed_over = f"{lifecycle.action} was handed over to {lifecycle.handed_over_to}"
            why = f"its {handed_over} at {lifecycle.handed_over_at.isoformat()}; it can only be undone"
        else:
            why = "only a stop that was not handed over yet can be vetoed"
        return lifecycle, [Refuse(f"the decision is {lifecycle.state}: {why}")]
    lifecycle, record = end_decision(lifecycle, DecisionState.VETOED, event.actor, event.reason)
    return lifecycle, [Cancel("the decision was vetoed"), record]


def _apply_postponement(lifecycle: L, event: Postponed, timeouts: Timeouts) -> Transition[L]:
    if lifecycle.state is not DecisionState.PENDING:
        return lifecycle, [Refuse(f"the decision is {lifecycle.state}; only a pending one can wait")]
    if lifecycle.was_postponed:
        return lifecycle, [Refuse("the stop was put off already, until its veto window ends; it can be vetoed")]
    due_at = timeouts.find_opening(max(event.until, lifecycle.due_at))
    details = {"postponed_until": due_at.isoformat()}
    postponed = replace(lifecycle, due_at=due_at, was_postponed=True)
    return postponed, [Record(DecisionState.PENDING, event.actor, event.reason, details)]


def _apply_report(lifecycle: L, event: Reported, timeouts: Timeouts) -> Transition[L]:
    if lifecycle.state is DecisionState.UNDONE:
        if event.state in lifecycle.late_reports:
            return lifecycle, []
        details = event.details | {"reported": str(event.state)}
        lifecycle = replace(lifecycle, late_reports=lifecycle.late_reports | {str(event.state)})
        return lifecycle, [Record(DecisionState.UNDONE, event.actor, event.reason, details)]
    seen_late = lifecycle.state is DecisionState.OBEYED and event.state is DecisionState.ACKNOWLEDGED
    if lifecycle.state is event.state or seen_late:
        return lifecycle, []
    if event.state not in NEXT_STATES[lifecycle.state]:
        return lifecycle, [Refuse(f"the decision is {lifecycle.state}; it cannot become {event.state}")]
    if event.state is DecisionState.PARKED and lifecycle.action is Action.STOP:
        return lifecycle, [Refuse("the job is to be stopped, not parked; report confirmed once it is gone")]
    if event.state is DecisionState.ACKNOWLEDGED:
        record = Record(event.state, event.actor, event.reason, event.details)
        return await_report(lifecycle, event.state, event.at, timeouts, event.expected_seconds), [record]
    if event.state is DecisionState.FAILED:
        return fail_decision(lifecycle, event.at, event.actor, event.reason, event.details)
    ended, record = end_decision(lifecycle, event.state, event.actor, event.reason, event.details)
    if event.state is DecisionState.PARKED:
        parked = replace(ended, deadline_at=event.at + timedelta(seconds=PARKED_SECONDS))
        return parked, [record, Announce(EventType.PARKED, {"report": event.details})]
    if lifecycle.state is DecisionState.OBEYED or lifecycle.action is Action.EXPLOIT:
        return ended, [record]  # announced when the trainer ended the run; a copy does not end it
    return ended, [record, Announce(EventType.STOPPED, {"report": event.details})]


def _apply_run_end(lifecycle: L, event: RunEnded) -> Transition[L]:
    ended = f"the run ended by itself: {event.status}"
    if lifecycle.action is Action.EXPLOIT:
        return _drop_exploit(lifecycle, ended)
    if lifecycle.state is DecisionState.FAILED and not lifecycle.state_reason.endswith(ended):
        reason = f"{lifecycle.state_reason}; {ended}"
        return lifecycle, [Record(DecisionState.FAILED, SERVICE, reason)]
    unsent = lifecycle.state in (DecisionState.PENDING, DecisionState.ON_HOLD)
    unseen = lifecycle.state in (DecisionState.REQUESTED, DecisionState.ESCALATED) and not event.receiver_informed
    if not unsent and not unseen and lifecycle.state is not DecisionState.PARKED:
        return lifecycle, []
    # What people ask later is why the run was not stopped, not that it ended.
    reason = f"on hold when {ended}; {lifecycle.state_reason}" if lifecycle.state is DecisionState.ON_HOLD else ended
    lifecycle, record = end_decision(lifecycle, DecisionState.MOOT, SERVICE, reason)
    return lifecycle, [Cancel("the run ended by itself"), record]


def _apply_obedience(lifecycle: L, event: RunObeyed) -> Transition[L]:
    if DecisionState.OBEYED not in NEXT_STATES[lifecycle.state] or lifecycle.action is not Action.STOP:
        return lifecycle, []
    reason = "the trainer saw the stop and ended the run by itself"
    lifecycle, record = end_decision(lifecycle, DecisionState.OBEYED, event.actor, reason)
    return lifecycle, [Cancel(reason), record, Announce(EventType.STOPPED, {"report": {"reason": reason}})]


def _drop_exploit(lifecycle: L, why: str) -> Transition[L]:
    """End an exploit that is not confirmed yet: the run goes on without it, or not at all."""
    if lifecycle.state not in OPEN_EXPLOIT:
        return lifecycle, []
    lifecycle, record = end_decision(lifecycle, DecisionState.MOOT, SERVICE, why)
    return lifecycle, [Cancel(why), record]


def _apply_resume(lifecycle: L, event: RunResumed) -> Transition[L]:
    if lifecycle.action is Action.EXPLOIT:
        return _drop_exploit(lifecycle, f"the trainer resumed from step {event.step} before it confirmed the copy")
    instructions: list[Instruction] = [Cancel("the run resumed in a new attempt")]
    if lifecycle.state in (DecisionState.PENDING, DecisionState.ON_HOLD):
        state, before = DecisionState.VETOED, "the stop was requested"
    elif lifecycle.state in (DecisionState.REQUESTED, DecisionState.ESCALATED) and not event.receiver_informed:
        state, before = DecisionState.MOOT, "a receiver had the stop"
    else:
        return lifecycle, instructions
    reason = f"the trainer resumed from step {event.step} before {before}"
    lifecycle, record = end_decision(lifecycle, state, SERVICE, reason)
    return lifecycle, [*instructions, record]


def _apply_undo(lifecycle: L, event: Undone) -> Transition[L]:
    if lifecycle.state is DecisionState.UNDONE:
        return lifecycle, []
    if lifecycle.state is DecisionState.FAILED and event.heard_at is None:
        return lifecycle, [Refuse("the stop failed, and the run ended by itself: there is nothing to undo")]
    if lifecycle.has_missed(event.heard_at):
        return lifecycle, [Refuse("the stop failed, and the run went on: there is nothing to undo")]
    if lifecycle.state not in STOPPING:
        advice = "; veto it instead" if lifecycle.state in (DecisionState.PENDING, DecisionState.ON_HOLD) else ""
        why = "cannot be undone: its stop was never requested"
        return lifecycle, [Refuse(f"the decision is {lifecycle.state} and {why}{advice}")]
    copies = lifecycle.action is Action.EXPLOIT
    if copies and lifecycle.state is DecisionState.CONFIRMED:
        return lifecycle, [Refuse("the copy was made; have the trainer resume from a checkpoint of its own")]
    lifecycle, record = end_decision(lifecycle, DecisionState.UNDONE, event.actor, event.reason)
    announced = [] if copies else [Announce(EventType.RESUME_REQUESTED)]
    return lifecycle, [Cancel("the decision was undone"), record, *announced]


def _apply_recovery(lifecycle: L, event: Recovered) -> Transition[L]:
    if lifecycle.action is not Action.PARK or lifecycle.state not in RETURNING:
        return lifecycle, []
    asked = lifecycle.state not in (DecisionState.PENDING, DecisionState.ON_HOLD)
    state = DecisionState.UNDONE if asked else DecisionState.MOOT
    lifecycle, record = end_decision(lifecycle, state, event.actor, event.reason)
    announced = [Announce(EventType.RESUME_REQUESTED)] if asked else []
    return lifecycle, [Cancel("the run has recovered"), record, *announced]
