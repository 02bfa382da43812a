"""What several events do to a decision: put it on hold, open its veto window, await a report, end it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from evalstop_service.domain.decision_events import Announce, L, Record, Transition
from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Guard, GuardKind, Lifecycle, Timeouts
from evalstop_service.domain.event_types import EventType

RECHECK_SECONDS = 60.0
"""The time between two checks of the guards of a decision on hold."""


def put_on_hold(lifecycle: L, at: datetime, guards: tuple[Guard, ...], actor: str, reason: str) -> Transition[L]:
    """Hold the stop back, and tell people, until its guards are rechecked."""
    # The last decision of a job releases the others, which wait for nothing else.
    is_last = all(guard.kind is GuardKind.SHARED_JOB and guard.details["waiting"] for guard in guards)
    deadline_at = at + timedelta(seconds=0.0 if is_last else RECHECK_SECONDS)
    on_hold = replace(lifecycle, state=DecisionState.ON_HOLD, deadline_at=deadline_at, escalations=0)
    on_hold = replace(on_hold, guard_kinds=list_kinds(guards))
    details = describe_guards(guards)
    announced = [] if lifecycle.action is Action.EXPLOIT else [Announce(EventType.STOP_ON_HOLD, details)]
    return on_hold, [Record(on_hold.state, actor, reason, details), *announced]


def open_veto_window(
    lifecycle: L,
    at: datetime,
    actor: str,
    reason: str,
    timeouts: Timeouts,
    details: dict[str, Any] | None = None,
) -> Transition[L]:
    """Carry the stop out: start its veto window and tell people, or request it at once if there is none."""
    due_at = timeouts.find_opening(at + timedelta(seconds=timeouts.veto_window_seconds))
    lifecycle = replace(lifecycle, state=DecisionState.PENDING, due_at=due_at, deadline_at=None)
    if due_at > at:
        return lifecycle, [Record(lifecycle.state, actor, reason, details or {}), Announce(pending_type(lifecycle))]
    lifecycle = await_report(lifecycle, DecisionState.REQUESTED, at, timeouts)
    return lifecycle, [Record(lifecycle.state, actor, reason, details or {}), Announce(request_type(lifecycle))]


def request_type(lifecycle: Lifecycle) -> EventType:
    return EventType(f"run.{lifecycle.action}_requested")


def pending_type(lifecycle: Lifecycle) -> EventType:
    return EventType(f"run.{lifecycle.action}_pending")


def await_report(
    lifecycle: L, state: DecisionState, at: datetime, timeouts: Timeouts, expected_seconds: float = 0.0
) -> L:
    """Give a receiver until a deadline to report; `expected_seconds`: how long the job may take to end."""
    deadline_at = at + timedelta(seconds=expected_seconds + timeouts.confirm_seconds)
    return replace(lifecycle, state=state, deadline_at=deadline_at)


def fail_decision(lifecycle: L, at: datetime, actor: str, reason: str, report: dict[str, Any]) -> Transition[L]:
    """End it as failed, and tell people; a copy that failed is only recorded."""
    failed, record = end_decision(lifecycle, DecisionState.FAILED, actor, reason, report)
    announced = [] if lifecycle.action is Action.EXPLOIT else [Announce(EventType.STOP_FAILED, {"report": report})]
    return replace(failed, failed_at=at), [record, *announced]


def end_decision(
    lifecycle: L, state: DecisionState, actor: str, reason: str, details: dict[str, Any] | None = None
) -> tuple[L, Record]:
    """Nothing is awaited any more, though a later event may still change the state."""
    record = Record(state, actor, reason, details or {})
    return replace(lifecycle, state=state, deadline_at=None), record


def list_kinds(guards: Iterable[Guard]) -> list[str]:
    return sorted({guard.kind for guard in guards})


def join_reasons(guards: Iterable[Guard]) -> str:
    return "; ".join(guard.reason for guard in guards)


def describe_guards(guards: Iterable[Guard]) -> dict[str, Any]:
    return {"guards": [asdict(guard) for guard in guards]}
