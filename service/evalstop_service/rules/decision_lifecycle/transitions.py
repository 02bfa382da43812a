"""What each event makes of a life, and what is to be done about it: functions of values, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from evalstop_service.rules.decision_lifecycle.states import (
    AWAITING,
    FOLLOWS,
    PAUSED,
    RESUME_REQUESTED,
    SERVICE,
    STOP_ESCALATED,
    STOP_FAILED,
    STOP_ON_HOLD,
    STOP_REQUESTED,
    STOPPED,
    STOPPING,
    Announce,
    Cancel,
    Decided,
    Event,
    Finished,
    Guard,
    Held,
    Instruction,
    Life,
    Mode,
    Ordered,
    Passed,
    Record,
    Refuse,
    Released,
    Reported,
    State,
    Terms,
    Undone,
    Vetoed,
    Weighed,
    WentOn,
)

RECHECK_SECONDS = 60.0
"""Between two looks at what speaks against a decision that is on hold."""

Outcome = tuple[Life, list[Instruction]]


def begin(event: Decided | Ordered, terms: Terms) -> Outcome:
    """How a decision is born, and what is to be done about it."""
    if isinstance(event, Ordered):
        return _ordered(Life(State.SHADOW, event.at), event, terms)
    due_at = event.at + timedelta(seconds=terms.grace_seconds)
    if event.mode is Mode.SHADOW:
        return Life(State.SHADOW, due_at), [Record(State.SHADOW, event.actor, event.reason, event.chance)]
    if event.held_out:
        return Life(State.HELD_OUT, due_at), [Record(State.HELD_OUT, event.actor, event.reason, event.chance)]
    if event.guards:
        return _withhold(Life(State.ON_HOLD, due_at), event.at, event.guards, event.actor, event.reason)
    return _let_go(Life(State.PENDING, due_at), event.at, event.actor, event.reason, terms)


def step(life: Life, event: Event, terms: Terms) -> Outcome:
    """What an event makes of a life, and what is to be done; `Refuse` stands alone and leaves the life as it was."""
    if life.state is State.PENDING and life.due_at <= event.at:
        began, before = _requested(life, event.at, terms)
        after, instructions = step(began, event, terms)
        refused = any(isinstance(one, Refuse) for one in instructions)
        return (life, instructions) if refused else (after, before + instructions)
    match event:
        case Passed():
            return _passed(life, event, terms)
        case Weighed():
            return _weighed(life, event, terms)
        case Held(at, guards):
            if life.state is not State.PENDING or not guards:
                return life, []
            return _withhold(life, at, guards, SERVICE, _reasons(guards), Cancel("the decision is on_hold"))
        case Released():
            return _released(life, event, terms)
        case Ordered():
            return _ordered(life, event, terms)
        case Vetoed(_, actor, reason):
            return _vetoed(life, actor, reason)
        case Reported():
            return _reported(life, event, terms)
        case Finished():
            return _finished(life, event)
        case WentOn():
            return _went_on(life, event)
        case Undone(_, actor, reason):
            return _undone(life, actor, reason)


def remembered(history: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[frozenset[str], frozenset[str]]:
    """`Life.held_by` and `Life.heard` as a history of states and details, oldest first, tells them."""
    held_by: frozenset[str] = frozenset()
    heard: frozenset[str] = frozenset()
    for state, details in history:
        if state == State.ON_HOLD:
            held_by = frozenset(guard["kind"] for guard in details.get("guards", ()))
        elif state == State.UNDONE and "reported" in details:
            heard |= {details["reported"]}
    return held_by, heard


def _passed(life: Life, event: Passed, terms: Terms) -> Outcome:
    if life.deadline_at is None or life.deadline_at > event.at or life.state is State.ON_HOLD:
        return life, []
    if event.gone_on:  # to ask again might end the job that goes on
        return _given_up(life, "no receiver has said what became of the job, and the run went on in a new attempt")
    if life.escalations >= 2:
        return _given_up(life, "no receiver has confirmed that the job is gone, though it was asked for harder")
    rung = life.escalations + 1
    asked = "asked for again" if rung == 1 else "asked for harder"
    life = _awaiting(replace(life, escalations=rung), State.ESCALATED, event.at, terms)
    why = f"no receiver has confirmed in time that the job is gone: the stop is {asked}"
    return life, [
        Record(State.ESCALATED, SERVICE, why, {"escalations": rung}),
        Announce(STOP_REQUESTED if rung == 1 else STOP_ESCALATED),
    ]


def _weighed(life: Life, event: Weighed, terms: Terms) -> Outcome:
    if life.state is not State.ON_HOLD:
        return life, []
    if event.wanted and not event.guards:
        return _let_go(life, event.at, SERVICE, "nothing speaks against the stop any more", terms)
    if event.wanted and _kinds(event.guards) != life.held_by:
        return _withhold(life, event.at, event.guards, SERVICE, _reasons(event.guards))
    return replace(life, deadline_at=event.at + timedelta(seconds=RECHECK_SECONDS)), []


def _released(life: Life, event: Released, terms: Terms) -> Outcome:
    if life.state in STOPPING or life.state is State.PENDING:
        return life, []
    if life.state is not State.ON_HOLD:
        return life, [Refuse(f"the decision is {life.state}; only an on-hold decision can be released")]
    if PAUSED in _kinds(event.guards):
        return life, [Refuse("the decision is on_hold and its project is paused; resume the project first")]
    return _let_go(life, event.at, event.actor, event.reason, terms, _documents(event.guards))


def _ordered(life: Life, event: Ordered, terms: Terms) -> Outcome:
    if life.state in AWAITING or life.state is State.CONFIRMED:
        return life, []
    if event.paused:
        return life, [Refuse("the project is paused, and nothing is stopped while it is; resume the project first")]
    if State.REQUESTED not in FOLLOWS[life.state]:
        why = "a receiver that knows of it would not act once more; end the job at its scheduler"
        return life, [Refuse(f"the decision is {life.state}: {why}")]
    life = _awaiting(replace(life, due_at=event.at, escalations=0), State.REQUESTED, event.at, terms)
    return life, [
        Cancel("a person has the run stopped at once"),
        Record(life.state, event.actor, event.reason, {"ordered": True}),
        Announce(STOP_REQUESTED),
    ]


def _vetoed(life: Life, actor: str, reason: str) -> Outcome:
    if life.state is State.VETOED:
        return life, []
    if life.state not in (State.PENDING, State.ON_HOLD):
        over = f" and its grace period ended at {life.due_at.isoformat()}" if life.state in STOPPING else ""
        return life, [Refuse(f"the decision is {life.state}{over}; only a pending or on hold decision can be vetoed")]
    life, instructions = _final(life, State.VETOED, actor, reason)
    return life, [Cancel("the decision was vetoed"), *instructions]


def _reported(life: Life, event: Reported, terms: Terms) -> Outcome:
    if life.state is State.UNDONE:
        if event.state in life.heard:
            return life, []
        details = event.details | {"reported": str(event.state)}
        life = replace(life, heard=life.heard | {str(event.state)})
        return life, [Record(State.UNDONE, event.actor, event.reason, details)]
    if life.state is event.state:
        return life, []
    if event.state not in FOLLOWS[life.state]:
        return life, [Refuse(f"the decision is {life.state}; it cannot become {event.state}")]
    record = Record(event.state, event.actor, event.reason, event.details)
    if event.state is State.ACKNOWLEDGED:
        return _awaiting(life, event.state, event.at, terms, event.expected_seconds), [record]
    announce = Announce(STOPPED if event.state is State.CONFIRMED else STOP_FAILED, {"report": event.details})
    return replace(life, state=event.state, deadline_at=None), [record, announce]


def _finished(life: Life, event: Finished) -> Outcome:
    before = life.state in (State.PENDING, State.ON_HOLD)
    if not before and (event.told or life.state not in (State.REQUESTED, State.ESCALATED)):
        return life, []
    life, instructions = _final(life, State.MOOT, SERVICE, f"the run ended by itself: {event.status}")
    return life, [Cancel("the run ended by itself"), *instructions]


def _went_on(life: Life, event: WentOn) -> Outcome:
    cancel = Cancel("the run went on in a new attempt")
    if life.state in (State.PENDING, State.ON_HOLD):
        why = f"the trainer went on from step {event.step} before the stop was handed out"
        life, instructions = _final(life, State.VETOED, SERVICE, why)
    elif life.state in (State.REQUESTED, State.ESCALATED) and not event.told:
        why = f"the trainer went on from step {event.step} before the stop had reached a receiver"
        life, instructions = _final(life, State.MOOT, SERVICE, why)
    else:
        instructions = []
    return life, [cancel, *instructions]


def _undone(life: Life, actor: str, reason: str) -> Outcome:
    if life.state is State.UNDONE:
        return life, []
    if life.state not in STOPPING:
        instead = "; veto it instead" if life.state in (State.PENDING, State.ON_HOLD) else ""
        return life, [Refuse(f"the decision is {life.state} and cannot be undone: nothing was handed out{instead}")]
    life, instructions = _final(life, State.UNDONE, actor, reason)
    return life, [Cancel("the decision was undone"), *instructions, Announce(RESUME_REQUESTED)]


def _withhold(
    life: Life, at: datetime, guards: tuple[Guard, ...], actor: str, reason: str, *first: Instruction
) -> Outcome:
    deadline_at = at + timedelta(seconds=RECHECK_SECONDS)
    life = replace(life, state=State.ON_HOLD, deadline_at=deadline_at, held_by=_kinds(guards))
    details = _documents(guards)
    return life, [*first, Record(State.ON_HOLD, actor, reason, details), Announce(STOP_ON_HOLD, details)]


def _let_go(
    life: Life, at: datetime, actor: str, reason: str, terms: Terms, details: dict[str, Any] | None = None
) -> Outcome:
    """Have it carried out: the grace period begins now."""
    if terms.grace_seconds <= 0:
        life = _awaiting(replace(life, due_at=at), State.REQUESTED, at, terms)
        return life, [Record(life.state, actor, reason, details or {}), Announce(STOP_REQUESTED)]
    due_at = at + timedelta(seconds=terms.grace_seconds)
    life = replace(life, state=State.PENDING, due_at=due_at, deadline_at=None)
    return life, [Record(life.state, actor, reason, details or {}), Announce(STOP_REQUESTED, due_at=due_at)]


def _requested(life: Life, at: datetime, terms: Terms) -> Outcome:
    record = Record(State.REQUESTED, SERVICE, "the grace period is over")
    return _awaiting(life, State.REQUESTED, at, terms), [record]


def _awaiting(life: Life, state: State, at: datetime, terms: Terms, expected_seconds: float = 0.0) -> Life:
    return replace(life, state=state, deadline_at=at + timedelta(seconds=expected_seconds + terms.confirm_seconds))


def _given_up(life: Life, why: str) -> Outcome:
    details = {"escalations": life.escalations}
    life, instructions = _final(life, State.FAILED, SERVICE, why, details)
    return life, [*instructions, Announce(STOP_FAILED, {"report": details})]


def _final(life: Life, state: State, actor: str, reason: str, details: dict[str, Any] | None = None) -> Outcome:
    return replace(life, state=state, deadline_at=None), [Record(state, actor, reason, details or {})]


def _kinds(guards: Iterable[Guard]) -> frozenset[str]:
    return frozenset(guard.kind for guard in guards)


def _reasons(guards: Iterable[Guard]) -> str:
    return "; ".join(guard.reason for guard in guards)


def _documents(guards: Iterable[Guard]) -> dict[str, Any]:
    return {"guards": [asdict(guard) for guard in guards]}
