"""The content of messages to people, for every channel: a headline, details, and the context. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Struct

from evalstop_service.rules.event_types import EventType
from evalstop_service.rules.run_results import BestCheckpoint, Verdict
from evalstop_service.webhooks.event_data import Decision, Guard, Policy, Project, RolloutStage, Run
from evalstop_service.webhooks.events import DECLARATIONS

MAX_TEXT_CHARACTERS = 600


class _Data(Struct):
    """The fields that messages mention, of every event type."""

    project: Project
    run: Run | None = None
    verdict: Verdict | None = None
    best_checkpoint: BestCheckpoint | None = None
    decision: Decision | None = None
    guards: list[Guard] = []
    policy: Policy | None = None
    rollout_stage: RolloutStage | None = None


class _Event(Struct):
    type: EventType
    timestamp: str
    data: _Data
    url: str | None = None


@dataclass(frozen=True)
class Message:
    """Texts of one line each. The headline is `before`, the name of the run or policy, and `after`.

    `details`: names and texts. `context`: type, project, time. `url`: the page of the run or policy, if known.
    """

    before: str
    name: str
    after: str
    details: tuple[tuple[str, str], ...]
    context: tuple[str, ...]
    url: str | None

    @property
    def headline(self) -> str:
        """The headline as plain text."""
        return f"{self.before}{self.name}{self.after}"


def read_message(body: str) -> Message:
    """The message for an event, given in the standard format."""
    event = msgspec.json.decode(body, type=_Event)
    before, name, after = _write_headline(event)
    return Message(
        before,
        _to_one_line(name),
        after,
        tuple((title, _to_one_line(detail)) for title, detail in _list_details(event.data)),
        tuple(map(_to_one_line, _list_context(event))),
        event.url,
    )


def _write_headline(event: _Event) -> tuple[str, str, str]:
    data, headline = event.data, DECLARATIONS[event.type].headline
    if data.run is not None:
        return "", data.run.name, f" {headline}"
    if data.policy is not None and data.rollout_stage is not None:
        stage = data.rollout_stage
        return "The policy ", data.policy.name, f" {headline} from {stage.from_stage} to {stage.to}"
    return f"EvalStop can reach this channel ({event.type})", "", ""


def _list_details(data: _Data) -> list[tuple[str, str]]:
    details = []
    cause = data.verdict or data.rollout_stage
    if cause is not None and cause.reason:
        details.append(("Reason", cause.reason))
    if data.guards:
        details.append(("Guards", "; ".join(guard.reason for guard in data.guards)))
    if data.best_checkpoint is not None:
        details.append(("Best checkpoint", f"step {data.best_checkpoint.step}, {data.best_checkpoint.uri}"))
    return details


def _list_context(event: _Event) -> list[str]:
    parts = [str(event.type), f"project {event.data.project.name}", event.timestamp]
    return parts + ([f"decision {event.data.decision.id}"] if event.data.decision else [])


def _to_one_line(text: str) -> str:
    """Untrusted text as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_CHARACTERS else line[: MAX_TEXT_CHARACTERS - 1] + "…"
