"""What a receiver for some scheduler must implement: given a request to stop, end the job and say how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from evalstop_client.errors import EventMalformed

STOP_REQUESTED = "run.stop_requested"


@dataclass(frozen=True)
class StopRequest:
    """A stop event in the words that an action needs; `event` is all of it."""

    webhook_id: str
    decision_id: str
    run_id: str
    run_name: str
    labels: Mapping[str, str]
    reason: str
    best_checkpoint: Mapping[str, Any] | None
    event: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Ended:
    """The job is gone, and that was checked; `details` is what is known of its end."""

    reason: str
    details: Mapping[str, Any]


@dataclass(frozen=True)
class NotMine:
    """The job belongs to another receiver: nothing was done, nothing is to be reported."""


@dataclass(frozen=True)
class Failed:
    """The job could not be ended, or not be seen to have ended."""

    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Action(Protocol):
    """Ends jobs of one scheduler."""

    @property
    def name(self) -> str:
        """How it calls itself in reports, such as `evalstop-receiver process`."""
        ...

    def stop(self, request: StopRequest) -> Ended | NotMine | Failed:
        """End the job that `request` is about and wait until it is gone; stopping twice must be harmless."""
        ...


def event_in(body: bytes) -> dict[str, Any]:
    """The event that a verified webhook carries; EventMalformed when it carries none."""
    try:
        event = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EventMalformed(f"The body is no JSON: {error}.") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise EventMalformed("The body must be an object with a type.")
    return event


def stop_request_in(webhook_id: str, event: Mapping[str, Any]) -> StopRequest:
    """The request that an event of type run.stop_requested makes; EventMalformed when something is missing."""
    run, decision, verdict = (_object(event, "data", name) for name in ("run", "decision", "verdict"))
    labels = run.get("labels")
    best = _object(event, "data").get("best_checkpoint")
    if not isinstance(run.get("id"), str) or not isinstance(decision.get("id"), str):
        raise EventMalformed("data.run.id and data.decision.id must be strings.")
    return StopRequest(
        webhook_id=webhook_id,
        decision_id=decision["id"],
        run_id=run["id"],
        run_name=str(run.get("name", "")),
        labels=labels if isinstance(labels, dict) else {},
        reason=str(verdict.get("reason", "")),
        best_checkpoint=best if isinstance(best, dict) else None,
        event=event,
    )


def _object(event: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    found: Any = event
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise EventMalformed(f"{'.'.join(path)} must be an object.")
    return found
