"""What people do about a decision: prevent it, carry it out despite its guards, take it back, or order it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from evalstop_service.domain.decision_events import Event, is_allowed
from evalstop_service.domain.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    NEXT_STATES,
    STOPPING,
    Action,
    Announce,
    Cancel,
    DecisionState,
    Guard,
    GuardKind,
    L,
    Lifecycle,
    Record,
    Refuse,
    Timeouts,
    Transition,
    await_report,
    describe_guards,
    end_decision,
    list_kinds,
    open_veto_window,
)
from evalstop_service.domain.event_types import EventType

ActionOfPerson = Literal["veto", "release", "undo", "stop"]


def allowed_actions(lifecycle: Lifecycle | None, at: datetime, heard_at: datetime | None) -> list[ActionOfPerson]:
    """What people may do now about the decision on a run's attempt, if there is one, and about the run.

    `heard_at`: when the run last reported; None: it ended.
    """
    if lifecycle is None:
        return [] if heard_at is None else ["stop"]
    commands: list[tuple[ActionOfPerson, Event]] = [("veto", Vetoed(at, "", "")), ("release", Released(at, "", ""))]
    commands.append(("undo", Undone(at, "", "", heard_at)))
    commands += [] if heard_at is None else [("stop", StopOrdered(at, "", ""))]
    return [name for name, command in commands if is_allowed(lifecycle, command)]


@dataclass(frozen=True)
class Command(Event):
    """A person's command, with a reason."""

    actor: str
    reason: str


class Vetoed(Command):
    """A person lets the run continue."""

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.state is DecisionState.VETOED:
            return lifecycle, []
        if not lifecycle.is_vetoable:
            if lifecycle.handed_over_at is not None:
                handed_over = f"{lifecycle.action} was handed over to {lifecycle.handed_over_to}"
                why = f"its {handed_over} at {lifecycle.handed_over_at.isoformat()}; it can only be undone"
            else:
                why = "only a stop that was not handed over yet can be vetoed"
            return lifecycle, [Refuse(f"the decision is {lifecycle.state}: {why}")]
        lifecycle, record = end_decision(lifecycle, DecisionState.VETOED, self.actor, self.reason)
        return lifecycle, [Cancel("the decision was vetoed"), record]


@dataclass(frozen=True)
class Postponed(Command):
    """A person has a pending stop wait until then; once in a veto window."""

    until: datetime

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.state is not DecisionState.PENDING:
            return lifecycle, [Refuse(f"the decision is {lifecycle.state}; only a pending one can wait")]
        if lifecycle.was_postponed:
            return lifecycle, [Refuse("the stop was put off already, until its veto window ends; it can be vetoed")]
        due_at = timeouts.find_opening(max(self.until, lifecycle.due_at))
        details = {"postponed_until": due_at.isoformat()}
        postponed = replace(lifecycle, due_at=due_at, was_postponed=True)
        return postponed, [Record(DecisionState.PENDING, self.actor, self.reason, details)]


@dataclass(frozen=True)
class Undone(Command):
    """A person takes back a requested stop, or has a parked job return.

    `heard_at`: when the run last reported; None: it ended.
    """

    heard_at: datetime | None = None

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.state is DecisionState.UNDONE:
            return lifecycle, []
        if lifecycle.state is DecisionState.FAILED and self.heard_at is None:
            return lifecycle, [Refuse("the stop failed, and the run ended by itself: there is nothing to undo")]
        if lifecycle.has_missed(self.heard_at):
            return lifecycle, [Refuse("the stop failed, and the run went on: there is nothing to undo")]
        if lifecycle.state not in STOPPING:
            advice = "; veto it instead" if lifecycle.state in (DecisionState.PENDING, DecisionState.ON_HOLD) else ""
            why = "cannot be undone: its stop was never requested"
            return lifecycle, [Refuse(f"the decision is {lifecycle.state} and {why}{advice}")]
        copies = lifecycle.action is Action.EXPLOIT
        if copies and lifecycle.state is DecisionState.CONFIRMED:
            return lifecycle, [Refuse("the copy was made; have the trainer resume from a checkpoint of its own")]
        lifecycle, record = end_decision(lifecycle, DecisionState.UNDONE, self.actor, self.reason)
        announced = [] if copies else [Announce(EventType.RESUME_REQUESTED)]
        return lifecycle, [Cancel("the decision was undone"), record, *announced]


@dataclass(frozen=True)
class Released(Command):
    """A person releases a stop on hold despite its guards."""

    guards: tuple[Guard, ...] = ()

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.state in STOPPING or lifecycle.state is DecisionState.PENDING:
            return lifecycle, []
        if lifecycle.state is not DecisionState.ON_HOLD:
            return lifecycle, [Refuse(f"the decision is {lifecycle.state}; only a decision on hold can be released")]
        if GuardKind.PAUSED in list_kinds(self.guards):
            return lifecycle, [Refuse("the decision is on hold and its project is paused; resume the project first")]
        return open_veto_window(lifecycle, self.at, self.actor, self.reason, timeouts, describe_guards(self.guards))


@dataclass(frozen=True)
class StopOrdered(Command):
    """A person stops the run at once, regardless of policy, mode and guards, except for a pause of the project."""

    paused: bool = False

    def apply(self, lifecycle: L, timeouts: Timeouts) -> Transition[L]:
        if lifecycle.action is Action.EXPLOIT:
            return lifecycle, [Refuse("the run is to copy another one; order its stop by itself")]
        if lifecycle.state in AWAITING_CONFIRMATION and lifecycle.action is Action.PARK:
            return lifecycle, [Refuse("the job is being parked; stop the run once it is parked")]
        if lifecycle.state in AWAITING_CONFIRMATION:
            next_step = "unless it is confirmed, it is repeated and then forced"
            return lifecycle, [Refuse(f"the stop is {lifecycle.state} already and was not sent again: {next_step}")]
        if self.paused:
            return lifecycle, [Refuse("the project is paused, so no run is stopped; resume the project first")]
        if DecisionState.REQUESTED not in NEXT_STATES[lifecycle.state]:
            why = "receivers ignore a stop that they have seen before; cancel the job at its scheduler"
            return lifecycle, [Refuse(f"the decision is {lifecycle.state}: {why}")]
        lifecycle = replace(
            lifecycle, due_at=self.at, escalations=0, action=Action.STOP, handed_over_at=None, handed_over_to=None
        )
        return await_report(lifecycle, DecisionState.REQUESTED, self.at, timeouts), [
            Cancel("a person stopped the run at once"),
            Record(DecisionState.REQUESTED, self.actor, self.reason, {"ordered": True}),
            Announce(EventType.STOP_REQUESTED),
        ]
