"""What happens to a decision without a person, and what follows: `apply` of each event says how.

Elapsed time is an event too: `TimePassed` for deadlines, `WindowEnded` for veto windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from evalstop_service.domain.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    NEXT_STATES,
    OPEN_EXPLOIT,
    RECHECK_SECONDS,
    RETURNING,
    SERVICE,
    Action,
    Announce,
    Cancel,
    DecisionState,
    Guard,
    Instruction,
    L,
    Mode,
    Record,
    Refuse,
    Timeouts,
    Transition,
    await_report,
    end_decision,
    fail_decision,
    join_reasons,
    list_kinds,
    open_veto_window,
    pending_type,
    put_on_hold,
    request_type,
)
from evalstop_service.domain.event_types import EventType

PARKED_SECONDS = 7 * 86_400.0
"""When people are reminded of a parked job, and again after the same time."""


@dataclass(frozen=True)
class Event:
    """Something that may change the state of a decision."""

    at: datetime

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        """The state after this event, and the instructions that follow; call `apply_event`."""
        raise NotImplementedError


def apply_event(lifecycle: L, event: Event, timeouts: Timeouts) -> Transition[L]:
    """The state after an event, and the instructions that follow; a single `Refuse` where nothing changes.

    The state has the reason of its last change, and the guards of a stop on hold only.
    """
    lifecycle, instructions = event.apply(lifecycle, timeouts)
    records = [instruction for instruction in instructions if isinstance(instruction, Record)]
    if records:
        guard_kinds = lifecycle.guard_kinds if lifecycle.state is DecisionState.ON_HOLD else []
        lifecycle = replace(lifecycle, state_reason=records[-1].state_reason, guard_kinds=guard_kinds)
    return lifecycle, instructions


def is_allowed(lifecycle: L, event: Event) -> bool:
    """Whether an event would change the decision: people are offered what is allowed, by the same rules."""
    after, instructions = apply_event(lifecycle, event, Timeouts(0.0, 0.0))
    return after != lifecycle and not any(isinstance(instruction, Refuse) for instruction in instructions)


@dataclass(frozen=True)
class StopDecided(Event):
    """The policy, or the rule of the run's group, calls for a stop, for the job to be parked, or for a copy: the first
    event of a decision.

    `held_out`: random assignment holds it out, with the numbers in `draw`.
    """

    actor: str
    reason: str
    mode: Mode
    guards: tuple[Guard, ...]
    held_out: bool = False
    draw: dict[str, float] = field(default_factory=dict)
    action: Action = Action.STOP

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        due_at = self.at + timedelta(seconds=timeouts.veto_window_seconds)
        begun = replace(lifecycle, due_at=due_at, action=self.action)
        if self.mode is Mode.SHADOW or self.held_out:
            state = DecisionState.SHADOW if self.mode is Mode.SHADOW else DecisionState.HELD_OUT
            return replace(begun, state=state), [Record(state, self.actor, self.reason, self.draw)]
        if self.guards:
            return put_on_hold(begun, self.at, self.guards, self.actor, self.reason)
        return open_veto_window(begun, self.at, self.actor, self.reason, timeouts)


@dataclass(frozen=True)
class TimePassed(Event):
    """Time has passed. `attempt_over`: the run is in a later attempt than the one to be stopped.

    `refusal`: why no receiver will ever accept the stop; None: one accepted it, or still may.
    """

    attempt_over: bool = False
    refusal: str | None = None

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        overdue = lifecycle.deadline_at is not None and lifecycle.deadline_at <= self.at
        refused = self.refusal is not None and lifecycle.state is not DecisionState.ACKNOWLEDGED
        if overdue and lifecycle.state is DecisionState.PARKED:  # perhaps it was forgotten
            lifecycle = replace(lifecycle, deadline_at=self.at + timedelta(seconds=PARKED_SECONDS))
            reason = f"parked for {PARKED_SECONDS / 86_400:.0f} days: have it return, or stop it"
            return lifecycle, [Record(lifecycle.state, SERVICE, reason), Announce(EventType.PARK_OVERDUE)]
        if not (overdue or refused) or lifecycle.state not in AWAITING_CONFIRMATION:
            return lifecycle, []
        failure = self._find_failure(lifecycle, refused=refused)
        if failure is not None:
            return fail_decision(lifecycle, self.at, SERVICE, failure, {"escalations": lifecycle.escalations})
        # Repeat the same request first, in case it was lost; then escalate to force.
        escalations = lifecycle.escalations + 1
        action = "requested again" if escalations == 1 else "escalated"
        reason = f"no receiver confirmed in time that the job {_AWAITED[lifecycle.action]} is {action}"
        if lifecycle.action is Action.EXPLOIT:
            reason = "the trainer did not confirm the copy in time: it is asked again"
        lifecycle = replace(lifecycle, escalations=escalations)
        return await_report(lifecycle, DecisionState.ESCALATED, self.at, timeouts), [
            Record(DecisionState.ESCALATED, SERVICE, reason, {"escalations": escalations}),
            Announce(request_type(lifecycle) if escalations == 1 else EventType.STOP_ESCALATED),
        ]

    def _find_failure(self, lifecycle: L, *, refused: bool) -> str | None:
        """Why an unconfirmed stop is not requested again."""
        if self.attempt_over:  # it might end the current attempt
            return "no receiver reported what became of the job, and the run resumed in a new attempt"
        if lifecycle.action is Action.EXPLOIT:
            asked_again = "the trainer did not confirm the copy, even after it was asked again"
            return asked_again if lifecycle.escalations else None
        if refused:
            return f"no receiver accepts the request: {self.refusal}"
        if lifecycle.action is Action.PARK and lifecycle.escalations >= 1:  # parking is never forced
            return "no receiver confirmed that the job is parked, even after it was asked again"
        if lifecycle.escalations >= 2:
            return "no receiver confirmed that the job is gone, even after the stop was escalated"
        return None


_AWAITED = {Action.STOP: "is gone: the stop", Action.PARK: "is parked: it", Action.EXPLOIT: ""}


@dataclass(frozen=True)
class WindowEnded(Event):
    """All vetoes that were sent before `heard_until` have been dealt with."""

    heard_until: datetime

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.state is not DecisionState.PENDING or self.heard_until < lifecycle.due_at:
            return lifecycle, []
        # The window ended while no process ran, or the hours were changed since it opened.
        if (opening := timeouts.find_opening(self.at)) > self.at:
            return replace(lifecycle, due_at=opening), [Record(lifecycle.state, SERVICE, explain_hours(opening))]
        requested = await_report(lifecycle, DecisionState.REQUESTED, self.at, timeouts)
        record = Record(requested.state, SERVICE, "the veto window is over")
        return requested, [record, Announce(request_type(lifecycle))]


def explain_hours(opening: datetime) -> str:
    """Why a stop waits until then."""
    return f"stops go out within the project's hours only, next at {opening:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True)
class WindowReopened(Event):
    """A stop that nobody was handed has to wait until `due_at`, for `reason`."""

    due_at: datetime
    reason: str

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if not lifecycle.is_unsent or lifecycle.state is DecisionState.PENDING:  # its window is open
            return lifecycle, []
        pending = replace(lifecycle, state=DecisionState.PENDING, due_at=self.due_at, deadline_at=None, escalations=0)
        announced = [Announce(pending_type(pending))] if self.due_at > self.at else []
        return pending, [Cancel(self.reason), Record(pending.state, SERVICE, self.reason), *announced]


@dataclass(frozen=True)
class GuardsChecked(Event):
    """The guards of a decision on hold were rechecked; `verdict_stops`: the verdict still calls for the stop.

    `withdrawn`: why the rule of a group that called for it no longer does.
    """

    guards: tuple[Guard, ...]
    verdict_stops: bool
    withdrawn: str | None = None

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.state is not DecisionState.ON_HOLD:
            return lifecycle, []
        if self.withdrawn is not None:
            lifecycle, record = end_decision(lifecycle, DecisionState.MOOT, SERVICE, self.withdrawn)
            return lifecycle, [record]
        if self.verdict_stops and not self.guards:
            return open_veto_window(lifecycle, self.at, SERVICE, "no guard holds the stop any longer", timeouts)
        if self.verdict_stops and list_kinds(self.guards) != lifecycle.guard_kinds:
            return put_on_hold(lifecycle, self.at, self.guards, SERVICE, join_reasons(self.guards))
        return replace(lifecycle, deadline_at=self.at + timedelta(seconds=RECHECK_SECONDS)), []


@dataclass(frozen=True)
class GuardsRaised(Event):
    """Guards were raised against a stop that nobody was handed."""

    guards: tuple[Guard, ...]

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if not lifecycle.is_unsent or not self.guards:
            return lifecycle, []
        on_hold, instructions = put_on_hold(lifecycle, self.at, self.guards, SERVICE, join_reasons(self.guards))
        return on_hold, [Cancel("the decision is on hold"), *instructions]


@dataclass(frozen=True)
class Recovered(Event):
    """The policy, which parks runs, no longer suspects this one."""

    actor: str
    reason: str

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.action is not Action.PARK or lifecycle.state not in RETURNING:
            return lifecycle, []
        asked = lifecycle.state not in (DecisionState.PENDING, DecisionState.ON_HOLD)
        state = DecisionState.UNDONE if asked else DecisionState.MOOT
        lifecycle, record = end_decision(lifecycle, state, self.actor, self.reason)
        announced = [Announce(EventType.RESUME_REQUESTED)] if asked else []
        return lifecycle, [Cancel("the run has recovered"), record, *announced]


@dataclass(frozen=True)
class Reported(Event):
    """A receiver reports `acknowledged`, `confirmed`, `parked` or `failed`.

    `expected_seconds`: with `acknowledged`, how long the job may take to end.
    """

    state: DecisionState
    actor: str
    reason: str
    details: dict[str, Any]
    expected_seconds: float = 0.0

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.state is DecisionState.UNDONE:
            late = f"{self.state} was reported: {self.reason}"
            if lifecycle.state_reason == late:  # the same report again
                return lifecycle, []
            return lifecycle, [Record(DecisionState.UNDONE, self.actor, late, self.details)]
        seen_late = lifecycle.state is DecisionState.OBEYED and self.state is DecisionState.ACKNOWLEDGED
        if lifecycle.state is self.state or seen_late:
            return lifecycle, []
        if self.state not in NEXT_STATES[lifecycle.state]:
            return lifecycle, [Refuse(f"the decision is {lifecycle.state}; it cannot become {self.state}")]
        if self.state is DecisionState.PARKED and lifecycle.action is Action.STOP:
            return lifecycle, [Refuse("the job is to be stopped, not parked; report confirmed once it is gone")]
        if self.state is DecisionState.ACKNOWLEDGED:
            record = Record(self.state, self.actor, self.reason, self.details)
            return await_report(lifecycle, self.state, self.at, timeouts, self.expected_seconds), [record]
        if self.state is DecisionState.FAILED:
            return fail_decision(lifecycle, self.at, self.actor, self.reason, self.details)
        ended, record = end_decision(lifecycle, self.state, self.actor, self.reason, self.details)
        if self.state is DecisionState.PARKED:
            parked = replace(ended, deadline_at=self.at + timedelta(seconds=PARKED_SECONDS))
            return parked, [record, Announce(EventType.PARKED, {"report": self.details})]
        if lifecycle.state is DecisionState.OBEYED or lifecycle.action is Action.EXPLOIT:
            return ended, [record]  # announced when the trainer ended the run; a copy does not end it
        return ended, [record, Announce(EventType.STOPPED, {"report": self.details})]


@dataclass(frozen=True)
class RunEnded(Event):
    """The run ended by itself; `receiver_informed`: a receiver may have the stop."""

    status: str
    receiver_informed: bool

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        ended = f"the run ended by itself: {self.status}"
        if lifecycle.action is Action.EXPLOIT:
            return _drop_exploit(lifecycle, ended)
        if lifecycle.state is DecisionState.FAILED and not lifecycle.state_reason.endswith(ended):
            return lifecycle, [Record(DecisionState.FAILED, SERVICE, f"{lifecycle.state_reason}; {ended}")]
        unsent = lifecycle.state in (DecisionState.PENDING, DecisionState.ON_HOLD)
        unseen = lifecycle.state in (DecisionState.REQUESTED, DecisionState.ESCALATED) and not self.receiver_informed
        if not unsent and not unseen and lifecycle.state is not DecisionState.PARKED:
            return lifecycle, []
        # What people ask later is why the run was not stopped, not that it ended.
        held = lifecycle.state is DecisionState.ON_HOLD
        reason = f"on hold when {ended}; {lifecycle.state_reason}" if held else ended
        lifecycle, record = end_decision(lifecycle, DecisionState.MOOT, SERVICE, reason)
        return lifecycle, [Cancel("the run ended by itself"), record]


@dataclass(frozen=True)
class RunObeyed(Event):
    """The trainer saw the stop and ended the run by itself; `actor`: the key of its report."""

    actor: str

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if DecisionState.OBEYED not in NEXT_STATES[lifecycle.state] or lifecycle.action is not Action.STOP:
            return lifecycle, []
        reason = "the trainer saw the stop and ended the run by itself"
        lifecycle, record = end_decision(lifecycle, DecisionState.OBEYED, self.actor, reason)
        return lifecycle, [Cancel(reason), record, Announce(EventType.STOPPED, {"report": {"reason": reason}})]


@dataclass(frozen=True)
class RunResumed(Event):
    """The trainer resumed from a step in a new attempt; `receiver_informed`: a receiver may have the stop."""

    step: int
    receiver_informed: bool

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.action is Action.EXPLOIT:
            why = f"the trainer resumed from step {self.step} before it confirmed the copy"
            return _drop_exploit(lifecycle, why)
        instructions: list[Instruction] = [Cancel("the run resumed in a new attempt")]
        if lifecycle.state in (DecisionState.PENDING, DecisionState.ON_HOLD):
            state, before = DecisionState.VETOED, "the stop was requested"
        elif lifecycle.state in (DecisionState.REQUESTED, DecisionState.ESCALATED) and not self.receiver_informed:
            state, before = DecisionState.MOOT, "a receiver had the stop"
        else:
            return lifecycle, instructions
        reason = f"the trainer resumed from step {self.step} before {before}"
        lifecycle, record = end_decision(lifecycle, state, SERVICE, reason)
        return lifecycle, [*instructions, record]


def _drop_exploit(lifecycle: L, why: str) -> Transition[L]:
    """End an exploit that is not confirmed yet: the run goes on without it, or not at all."""
    if lifecycle.state not in OPEN_EXPLOIT:
        return lifecycle, []
    lifecycle, record = end_decision(lifecycle, DecisionState.MOOT, SERVICE, why)
    return lifecycle, [Cancel(why), record]
