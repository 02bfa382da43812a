"""How numbers, moments and the standing of a run are put into words. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from evalstop_service.clock import rfc3339
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.store.runs import Run

STATES: dict[str, str] = {
    DecisionState.SHADOW: "recorded only",
    DecisionState.HELD_OUT: "held out",
    DecisionState.ON_HOLD: "stop on_hold",
    DecisionState.PENDING: "stop pending",
    DecisionState.REQUESTED: "stop requested",
    DecisionState.ACKNOWLEDGED: "stop under way",
    DecisionState.ESCALATED: "stop escalated",
    DecisionState.CONFIRMED: "stop confirmed",
    DecisionState.FAILED: "stop failed",
    DecisionState.VETOED: "vetoed",
    DecisionState.MOOT: "moot",
    DecisionState.UNDONE: "undone",
}

OUTCOMES = {"right": "right", "wrong": "wrong", "unknown": "can’t tell"}


def step(number: int) -> str:
    """A step with its thousands set apart."""
    return f"{number:,}".replace(",", "\u202f")


def number(value: float | None) -> str:
    """A number to four significant digits."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.4g}" if value % 1 or abs(value) >= 1e6 else f"{value:.0f}"
    return text.replace("-", "−")


def exact(value: float) -> str:
    """A number to its last digit, as it is on record."""
    return repr(value).replace("-", "−") if math.isfinite(value) else number(value)


def percent(share: float | None) -> str:
    """A share in percent, to a tenth where that tells something."""
    if share is None:
        return "–"
    return f"{share * 100:.0f} %" if share in (0, 1) else f"{share * 100:.1f} %"


def amount(value: float) -> str:
    """A quantity without more digits than anybody reads."""
    return step(round(value)) if abs(value) >= 10 else f"{value:.1f}"


def pair(value: str) -> tuple[str, str]:
    """A choice that is called what it is."""
    return value, value


def moment(at: datetime) -> str:
    """A moment for those whose browser does not put it into their own zone."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def iso(at: datetime) -> str:
    """A moment for machines."""
    return rfc3339(at.replace(microsecond=0))


def told(change: DecisionChange) -> dict[str, Any]:
    """The details of a change as the page shows them: each guard by its kind and reason."""
    if change.state not in (DecisionState.ON_HOLD, DecisionState.PENDING, DecisionState.REQUESTED):
        return change.details  # what a receiver said, in whatever words
    return {guard["kind"]: guard["reason"] for guard in change.details.get("guards", ())}


def standing(run: Run, decision: Decision | None, now: datetime) -> str:
    """Where a run stands, in one sentence."""
    if decision is not None:
        return _decided(decision, now)
    verdict = run.verdict
    if run.last_step is None:
        return "Nothing has been observed yet." if run.status == "running" else "The run ended unobserved."
    if verdict["verdict"] == "stop":
        return f"Calls for a stop since step {step(verdict['step'])}, but the run had ended."
    if verdict["verdict"] == "suspect":
        turn = verdict["turn_step"]
        where = f" around step {step(turn)}" if turn is not None else ""
        return f"Gold may have turned{where}; the evidence is not enough to stop."
    if run.raw_maximum is None:
        return "No eval has been observed yet: only the gold score can call for a stop."
    ends = {
        "completed": "The run completed; g",
        "failed": "The run failed; g",
        "stopped": "The run was stopped; g",
        "lost": "Nothing was heard of the run for long; g",
    }
    return f"{ends.get(run.status, 'G')}old shows no turn."


def _decided(decision: Decision, now: datetime) -> str:
    at = step(decision.step)
    match DecisionState(decision.state):
        case DecisionState.SHADOW:
            return f"Would have been stopped at step {at}; that is recorded, and nobody is told."
        case DecisionState.HELD_OUT:
            return f"A stop at step {at} is held out: by chance it is not carried out, to learn whether it is right."
        case DecisionState.ON_HOLD:
            return f"A stop at step {at} is on hold; what speaks against it is looked at again every minute."
        case DecisionState.PENDING if not decision.stops(now):
            until = moment(decision.due_at)
            return f"Will be stopped for its verdict at step {at} unless somebody vetoes it before {until}."
        case DecisionState.PENDING | DecisionState.REQUESTED:
            return f"A stop was requested for step {at}; no scheduler has confirmed yet that the job is gone."
        case DecisionState.ACKNOWLEDGED:
            return f"A receiver is carrying out the stop for step {at}; the job is not confirmed to be gone yet."
        case DecisionState.ESCALATED:
            times = "again" if decision.escalations == 1 else "harder"
            return (
                f"The stop for step {at} was not confirmed in time and was asked for {times}; the job may be running."
            )
        case DecisionState.CONFIRMED:
            return f"Stopped at step {at}; the job is confirmed to be gone."
        case DecisionState.FAILED:
            return f"A stop was requested at step {at} and failed: the job may still be running."
        case DecisionState.VETOED:
            return f"A stop at step {at} was vetoed; the run goes on."
        case DecisionState.MOOT:
            return f"A stop at step {at} is moot: the run ended or went on before any receiver had it."
        case DecisionState.UNDONE:
            return f"A stop at step {at} was undone; the run may go on."


def source(word: str) -> str:
    """Where a metric's role comes from, as it stands beside it."""
    kind, _, name = word.partition(" ")
    match kind:
        case "preset":
            return f"as {name} logs it"
        case "names":
            return "by its name"
        case "pattern":
            return "by a pattern of the project"
        case "person":
            return "a person said so"
        case "default":
            return "by default"
    return "its trainer said so"
