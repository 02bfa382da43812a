"""What each event makes of a life, and what is to be done about it: functions of values, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from evalstop_service.rules.decision_lifecycle.states import (
    AWAITING_CONFIRMATION,
    NEXT_STATES,
    PAUSED,
    SERVICE,
    STOPPING,
    Announce,
    Cancel,
    DecisionState,
    Event,
    Guard,
    GuardsChecked,
    GuardsRaised,
    Instruction,
    Lifecycle,
    Mode,
    Record,
    Refuse,
    Released,
    Reported,
    RunEnded,
    RunResumed,
    StopDecided,
    StopOrdered,
    Timeouts,
    TimePassed,
    Undone,
    Vetoed,
)
from evalstop_service.rules.event_types import EventType

RECHECK_SECONDS = 60.0
"""Between two looks at what speaks against a decision that is on hold."""

Transition = tuple[Lifecycle, list[Instruction]]


def start_lifecycle(event: StopDecided | StopOrdered, terms: Timeouts) -> Transition:
    """How a decision is born, and what is to be done about it."""
    if isinstance(event, StopOrdered):
        return _ordered(Lifecycle(DecisionState.SHADOW, event.at), event, terms)
    due_at = event.at + timedelta(seconds=terms.veto_window_seconds)
    if event.mode is Mode.SHADOW:
        return Lifecycle(DecisionState.SHADOW, due_at), [
            Record(DecisionState.SHADOW, event.actor, event.reason, event.chance)
        ]
    if event.held_out:
        return Lifecycle(DecisionState.HELD_OUT, due_at), [
            Record(DecisionState.HELD_OUT, event.actor, event.reason, event.chance)
        ]
    if event.guards:
        return _withhold(Lifecycle(DecisionState.ON_HOLD, due_at), event.at, event.guards, event.actor, event.reason)
    return _let_go(Lifecycle(DecisionState.PENDING, due_at), event.at, event.actor, event.reason, terms)


def apply_event(life: Lifecycle, event: Event, terms: Timeouts) -> Transition:
    """What an event makes of a life, and what is to be done; `Refuse` stands alone and leaves the life as it was."""
    if life.state is DecisionState.PENDING and life.due_at <= event.at:
        began, before = _requested(life, event.at, terms)
        after, instructions = apply_event(began, event, terms)
        refused = any(isinstance(one, Refuse) for one in instructions)
        return (life, instructions) if refused else (after, before + instructions)
    match event:
        case TimePassed():
            return _passed(life, event, terms)
        case GuardsChecked():
            return _weighed(life, event, terms)
        case GuardsRaised(at, guards):
            if life.state is not DecisionState.PENDING or not guards:
                return life, []
            return _withhold(life, at, guards, SERVICE, _reasons(guards), Cancel("the decision is on_hold"))
        case Released():
            return _released(life, event, terms)
        case StopOrdered():
            return _ordered(life, event, terms)
        case Vetoed(_, actor, reason):
            return _vetoed(life, actor, reason)
        case Reported():
            return _reported(life, event, terms)
        case RunEnded():
            return _finished(life, event)
        case RunResumed():
            return _went_on(life, event)
        case Undone(_, actor, reason):
            return _undone(life, actor, reason)


def read_history(history: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[frozenset[str], frozenset[str]]:
    """`Life.held_by` and `Life.heard` as a history of states and details, oldest first, tells them."""
    held_by: frozenset[str] = frozenset()
    heard: frozenset[str] = frozenset()
    for state, details in history:
        if state == DecisionState.ON_HOLD:
            held_by = frozenset(guard["kind"] for guard in details.get("guards", ()))
        elif state == DecisionState.UNDONE and "reported" in details:
            heard |= {details["reported"]}
    return held_by, heard


def _passed(life: Lifecycle, event: TimePassed, terms: Timeouts) -> Transition:
    if life.deadline_at is None or life.deadline_at > event.at or life.state is DecisionState.ON_HOLD:
        return life, []
    if event.gone_on:  # to ask again might end the job that goes on
        return _given_up(life, "no receiver has said what became of the job, and the run went on in a new attempt")
    if life.escalations >= 2:
        return _given_up(life, "no receiver has confirmed that the job is gone, though it was asked for harder")
    rung = life.escalations + 1
    asked = "asked for again" if rung == 1 else "asked for harder"
    life = _awaiting(replace(life, escalations=rung), DecisionState.ESCALATED, event.at, terms)
    why = f"no receiver has confirmed in time that the job is gone: the stop is {asked}"
    return life, [
        Record(DecisionState.ESCALATED, SERVICE, why, {"escalations": rung}),
        Announce(EventType.STOP_REQUESTED if rung == 1 else EventType.STOP_ESCALATED),
    ]


def _weighed(life: Lifecycle, event: GuardsChecked, terms: Timeouts) -> Transition:
    if life.state is not DecisionState.ON_HOLD:
        return life, []
    if event.wanted and not event.guards:
        return _let_go(life, event.at, SERVICE, "nothing speaks against the stop any more", terms)
    if event.wanted and _kinds(event.guards) != life.held_by:
        return _withhold(life, event.at, event.guards, SERVICE, _reasons(event.guards))
    return replace(life, deadline_at=event.at + timedelta(seconds=RECHECK_SECONDS)), []


def _released(life: Lifecycle, event: Released, terms: Timeouts) -> Transition:
    if life.state in STOPPING or life.state is DecisionState.PENDING:
        return life, []
    if life.state is not DecisionState.ON_HOLD:
        return life, [Refuse(f"the decision is {life.state}; only an on-hold decision can be released")]
    if PAUSED in _kinds(event.guards):
        return life, [Refuse("the decision is on_hold and its project is paused; resume the project first")]
    return _let_go(life, event.at, event.actor, event.reason, terms, _documents(event.guards))


def _ordered(life: Lifecycle, event: StopOrdered, terms: Timeouts) -> Transition:
    if life.state in AWAITING_CONFIRMATION or life.state is DecisionState.CONFIRMED:
        return life, []
    if event.paused:
        return life, [Refuse("the project is paused, and nothing is stopped while it is; resume the project first")]
    if DecisionState.REQUESTED not in NEXT_STATES[life.state]:
        why = "a receiver that knows of it would not act once more; end the job at its scheduler"
        return life, [Refuse(f"the decision is {life.state}: {why}")]
    life = _awaiting(replace(life, due_at=event.at, escalations=0), DecisionState.REQUESTED, event.at, terms)
    return life, [
        Cancel("a person has the run stopped at once"),
        Record(life.state, event.actor, event.reason, {"ordered": True}),
        Announce(EventType.STOP_REQUESTED),
    ]


def _vetoed(life: Lifecycle, actor: str, reason: str) -> Transition:
    if life.state is DecisionState.VETOED:
        return life, []
    if life.state not in (DecisionState.PENDING, DecisionState.ON_HOLD):
        over = f" and its veto window ended at {life.due_at.isoformat()}" if life.state in STOPPING else ""
        return life, [Refuse(f"the decision is {life.state}{over}; only a pending or on hold decision can be vetoed")]
    life, instructions = _final(life, DecisionState.VETOED, actor, reason)
    return life, [Cancel("the decision was vetoed"), *instructions]


def _reported(life: Lifecycle, event: Reported, terms: Timeouts) -> Transition:
    if life.state is DecisionState.UNDONE:
        if event.state in life.heard:
            return life, []
        details = event.details | {"reported": str(event.state)}
        life = replace(life, heard=life.heard | {str(event.state)})
        return life, [Record(DecisionState.UNDONE, event.actor, event.reason, details)]
    if life.state is event.state:
        return life, []
    if event.state not in NEXT_STATES[life.state]:
        return life, [Refuse(f"the decision is {life.state}; it cannot become {event.state}")]
    record = Record(event.state, event.actor, event.reason, event.details)
    if event.state is DecisionState.ACKNOWLEDGED:
        return _awaiting(life, event.state, event.at, terms, event.expected_seconds), [record]
    announce = Announce(
        EventType.STOPPED if event.state is DecisionState.CONFIRMED else EventType.STOP_FAILED,
        {"report": event.details},
    )
    return replace(life, state=event.state, deadline_at=None), [record, announce]


def _finished(life: Lifecycle, event: RunEnded) -> Transition:
    before = life.state in (DecisionState.PENDING, DecisionState.ON_HOLD)
    if not before and (event.told or life.state not in (DecisionState.REQUESTED, DecisionState.ESCALATED)):
        return life, []
    life, instructions = _final(life, DecisionState.MOOT, SERVICE, f"the run ended by itself: {event.status}")
    return life, [Cancel("the run ended by itself"), *instructions]


def _went_on(life: Lifecycle, event: RunResumed) -> Transition:
    cancel = Cancel("the run went on in a new attempt")
    if life.state in (DecisionState.PENDING, DecisionState.ON_HOLD):
        why = f"the trainer went on from step {event.step} before the stop was handed out"
        life, instructions = _final(life, DecisionState.VETOED, SERVICE, why)
    elif life.state in (DecisionState.REQUESTED, DecisionState.ESCALATED) and not event.told:
        why = f"the trainer went on from step {event.step} before the stop had reached a receiver"
        life, instructions = _final(life, DecisionState.MOOT, SERVICE, why)
    else:
        instructions = []
    return life, [cancel, *instructions]


def _undone(life: Lifecycle, actor: str, reason: str) -> Transition:
    if life.state is DecisionState.UNDONE:
        return life, []
    if life.state not in STOPPING:
        instead = "; veto it instead" if life.state in (DecisionState.PENDING, DecisionState.ON_HOLD) else ""
        return life, [Refuse(f"the decision is {life.state} and cannot be undone: nothing was handed out{instead}")]
    life, instructions = _final(life, DecisionState.UNDONE, actor, reason)
    return life, [Cancel("the decision was undone"), *instructions, Announce(EventType.RESUME_REQUESTED)]


def _withhold(
    life: Lifecycle, at: datetime, guards: tuple[Guard, ...], actor: str, reason: str, *first: Instruction
) -> Transition:
    deadline_at = at + timedelta(seconds=RECHECK_SECONDS)
    life = replace(life, state=DecisionState.ON_HOLD, deadline_at=deadline_at, held_by=_kinds(guards))
    details = _documents(guards)
    return life, [
        *first,
        Record(DecisionState.ON_HOLD, actor, reason, details),
        Announce(EventType.STOP_ON_HOLD, details),
    ]


def _let_go(
    life: Lifecycle, at: datetime, actor: str, reason: str, terms: Timeouts, details: dict[str, Any] | None = None
) -> Transition:
    """Have it carried out: the veto window begins now."""
    if terms.veto_window_seconds <= 0:
        life = _awaiting(replace(life, due_at=at), DecisionState.REQUESTED, at, terms)
        return life, [Record(life.state, actor, reason, details or {}), Announce(EventType.STOP_REQUESTED)]
    due_at = at + timedelta(seconds=terms.veto_window_seconds)
    life = replace(life, state=DecisionState.PENDING, due_at=due_at, deadline_at=None)
    return life, [Record(life.state, actor, reason, details or {}), Announce(EventType.STOP_REQUESTED, due_at=due_at)]


def _requested(life: Lifecycle, at: datetime, terms: Timeouts) -> Transition:
    record = Record(DecisionState.REQUESTED, SERVICE, "the veto window is over")
    return _awaiting(life, DecisionState.REQUESTED, at, terms), [record]


def _awaiting(
    life: Lifecycle, state: DecisionState, at: datetime, terms: Timeouts, expected_seconds: float = 0.0
) -> Lifecycle:
    return replace(life, state=state, deadline_at=at + timedelta(seconds=expected_seconds + terms.confirm_seconds))


def _given_up(life: Lifecycle, why: str) -> Transition:
    details = {"escalations": life.escalations}
    life, instructions = _final(life, DecisionState.FAILED, SERVICE, why, details)
    return life, [*instructions, Announce(EventType.STOP_FAILED, {"report": details})]


def _final(
    life: Lifecycle, state: DecisionState, actor: str, reason: str, details: dict[str, Any] | None = None
) -> Transition:
    return replace(life, state=state, deadline_at=None), [Record(state, actor, reason, details or {})]


def _kinds(guards: Iterable[Guard]) -> frozenset[str]:
    return frozenset(guard.kind for guard in guards)


def _reasons(guards: Iterable[Guard]) -> str:
    return "; ".join(guard.reason for guard in guards)


def _documents(guards: Iterable[Guard]) -> dict[str, Any]:
    return {"guards": [asdict(guard) for guard in guards]}
