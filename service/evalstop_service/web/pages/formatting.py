"""Numbers, times and states as the pages show them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from evalstop_detectors.policy.catalog import OUTLOOK

from evalstop_service.clock import rfc3339
from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Mode
from evalstop_service.domain.run import Call
from evalstop_service.domain.statuses import UNENDED, RunStatus
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.store.runs import Run

_LEVELLED_OFF_AT = 0.97
"""The covered share of its range from which a run has levelled off."""

_STATES: dict[str, str] = {
    DecisionState.SHADOW: "recorded only",
    DecisionState.HELD_OUT: "held out",
    DecisionState.ON_HOLD: "stop on hold",
    DecisionState.PENDING: "stop pending",
    DecisionState.REQUESTED: "stop requested",
    DecisionState.ACKNOWLEDGED: "stop under way",
    DecisionState.ESCALATED: "stop escalated",
    DecisionState.CONFIRMED: "stop confirmed",
    DecisionState.OBEYED: "stop obeyed",
    DecisionState.PARKED: "parked",
    DecisionState.FAILED: "stop failed",
    DecisionState.VETOED: "vetoed",
    DecisionState.MOOT: "moot",
    DecisionState.UNDONE: "undone",
}

_STATUSES = {
    RunStatus.COMPLETED: "The run completed.",
    RunStatus.FAILED: "The run failed.",
    RunStatus.STOPPED: "The run was stopped.",
    RunStatus.LOST: "The run stopped reporting.",
    RunStatus.PARKED: "The run is parked.",
}

_DRAWS = {"held_out_share": "share held out", "enforced_share": "share carried out"}


def format_json(document: Any) -> str:
    """A JSON document in indented lines."""
    return json.dumps(document, indent=2, ensure_ascii=False)


def name_state(state: str, action: str = Action.STOP) -> str:
    """A short name of a decision's state, by its action."""
    if action == Action.PARK and state == DecisionState.UNDONE:
        return "returned"
    return _STATES[state].replace("stop", {Action.PARK: "parking", Action.EXPLOIT: "copy"}.get(Action(action), "stop"))


def format_step(number: int) -> str:
    """A step with a comma between thousands."""
    return f"{number:,}"


def format_number(value: float | None) -> str:
    """A number to four significant digits."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.4g}" if value % 1 or abs(value) >= 1e6 else f"{value:.0f}"
    return text.replace("-", "−")


def format_percent(share: float | None) -> str:
    """A share in percent, with one decimal."""
    return "–" if share is None else f"{share * 100:.1f} %"


def format_amount(value: float) -> str:
    """A quantity: whole numbers from 10 on, one decimal below, and the first significant digit of smaller ones.

    >>> [format_amount(value) for value in (1234.5, 9.87, 0.0, 0.0027)]
    ['1,234', '9.9', '0.0', '0.003']
    """
    if 0.0001 <= abs(value) < 0.05:
        return f"{value:.1g}"
    return format_step(round(value)) if abs(value) >= 10 else f"{value:.1f}"


def format_time(at: datetime) -> str:
    """A time in UTC, for browsers without JavaScript."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def format_iso(at: datetime) -> str:
    """A time as in RFC 3339, to the second."""
    return rfc3339(at.replace(microsecond=0))


def suggest_name(kind: str, name: str | None, known: Iterable[str]) -> str:
    """A sentence about an unknown name, with a known name that is similar; empty if it is."""
    names = list(known)
    if name is None or name in names:
        return ""
    likely = get_close_matches(name, names, 1)
    return f"There is no {kind} “{name}”{f': did you mean “{likely[0]}”?' if likely else '.'}"


def explain_misnamed(declared: Iterable[str], posted: Iterable[str]) -> list[str]:
    """A sentence for each undeclared metric with a name similar to a declared metric that was not posted."""
    posted, declared = list(posted), list(declared)
    waiting = [name for name in declared if name not in posted]
    likely = {name: get_close_matches(name, waiting, 1) for name in posted if name not in declared}
    return [f"“{name}” is not declared: did you mean “{match[0]}”?" for name, match in likely.items() if match]


def list_change_details(change: DecisionChange) -> dict[str, Any]:
    """The details of a change of state: guards by kind and reason, a random draw and its limit in percent."""
    if change.state in (DecisionState.SHADOW, DecisionState.HELD_OUT):
        return {_DRAWS.get(name, name): format_percent(share) for name, share in change.details.items()}
    if change.state not in (DecisionState.ON_HOLD, DecisionState.PENDING, DecisionState.REQUESTED):
        return change.details  # free-form, from a receiver
    return {guard["kind"]: guard["reason"] for guard in change.details.get("guards", ())}


def describe_run(run: Run, decision: Decision | None, now: datetime) -> str:
    """The state of a run in one sentence."""
    if decision is not None:
        return _describe_decision(run, decision, now)
    verdict = run.verdict
    if run.last_step is None:
        return "No observations yet." if run.status == RunStatus.RUNNING else "The run ended without observations."
    if verdict.stops:
        return f"Stop called at step {format_step(verdict.step or 0)}, after the run had ended."
    if verdict.verdict is Call.SUSPECT:
        turn = verdict.turn_step
        where = f" around step {format_step(turn)}" if turn is not None else ""
        return f"The eval may have turned{where}; not enough evidence to stop."
    if run.raw_maximum is None:
        return "No eval yet. Only the eval can call a stop."
    levelled_off = any(item.detector == OUTLOOK and item.value >= _LEVELLED_OFF_AT for item in verdict.evidence)
    status = f"{_STATUSES[run.status]} " if run.status in _STATUSES else ""
    return f"{status}The eval {'has levelled off' if levelled_off else 'shows no turn'}."


def _describe_decision(run: Run, decision: Decision, now: datetime) -> str:
    if (copy := decision.exploit) is not None:
        until = (
            f" unless vetoed before {format_time(decision.due_at)}" if decision.state is DecisionState.PENDING else ""
        )
        name = name_state(decision.state, decision.action).capitalize()
        return f"{name}: to go on from step {format_step(copy.source_step)} of {copy.source_name}{until}."
    at = format_step(decision.step)
    going_on = "The run may continue." if decision.state is DecisionState.UNDONE else "The run continues."
    if decision.state is DecisionState.SHADOW:
        done = "parked" if decision.action is Action.PARK else "stopped"
        limit = "The run is in shadow"
        if run.mode is Mode.ENFORCE:
            limit = "The project's highest mode or the policy's rollout stage limits it"
        return f"Would have been {done} at step {at}. {limit}: recorded, not carried out."
    parks = decision.action is Action.PARK
    sentence = (_PARKING if parks else {}).get(decision.state) or _SENTENCES[decision.state]
    return sentence.format(
        **(_PARK_WORDS if parks else _STOP_WORDS),
        at=at,
        reason=decision.state_reason,
        status=_STATUSES.get(run.status, going_on),
        until=format_time(decision.due_at),
        job=_describe_job(run, decision),
        escalated="repeated" if decision.escalations == 1 else "escalated",
    )


def _describe_job(run: Run, decision: Decision) -> str:
    if decision.has_missed(run.heard_at):
        return f"The run went on, to step {format_step(run.last_step or 0)} so far."
    return "The job may still be running." if run.status in UNENDED else "The run is over."


_STOP_WORDS = {"Stop": "Stop", "The_stop": "The stop", "stopped": "stopped", "gone": "gone"}
_PARK_WORDS = {"Stop": "Parking", "The_stop": "Parking", "stopped": "parked", "gone": "set aside"}

_SENTENCES = {
    DecisionState.HELD_OUT: "{The_stop} at step {at} is held out at random, to measure whether it is right. {status}",
    DecisionState.ON_HOLD: "{Stop} on hold: {reason}. Called at step {at}; its guards are checked every minute.",
    DecisionState.PENDING: "Will be {stopped} for its verdict at step {at} unless vetoed before {until}.",
    DecisionState.REQUESTED: ("{Stop} requested at step {at}. No scheduler has confirmed yet that the job is {gone}."),
    DecisionState.ACKNOWLEDGED: (
        "A receiver is carrying out the stop at step {at}. The job is not confirmed to be gone yet."
    ),
    DecisionState.ESCALATED: (
        "The stop at step {at} was not confirmed in time and was {escalated}. The job may be running."
    ),
    DecisionState.CONFIRMED: "Stopped at step {at}. The job is confirmed to be gone.",
    DecisionState.OBEYED: "Stopped at step {at}: the trainer saw the stop and ended the run by itself.",
    DecisionState.PARKED: (
        "Parked at step {at}: the job is set aside and can return. It returns by itself once it recovers."
    ),
    DecisionState.FAILED: "{The_stop} at step {at} failed: {reason}. {job}",
    DecisionState.VETOED: "{The_stop} at step {at} was vetoed. {status}",
    DecisionState.MOOT: "{The_stop} at step {at} was not carried out: {reason}.",
    DecisionState.UNDONE: "{The_stop} at step {at} was undone. {status}",
}
"""The sentence about each state of a decision."""

_PARKING = {
    **dict.fromkeys((DecisionState.ACKNOWLEDGED, DecisionState.ESCALATED), _SENTENCES[DecisionState.REQUESTED]),
    DecisionState.CONFIRMED: "The job ended before it was parked. Parking was called for at step {at}.",
    DecisionState.UNDONE: "Was to be parked at step {at}; that was undone: {reason}. {status}",
}
"""Those that differ for a decision to park."""
