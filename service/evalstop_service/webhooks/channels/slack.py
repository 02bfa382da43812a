"""Events as Slack's incoming webhooks take them: a short text, and blocks with details. Pure.

Source: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks and its page on formatting text: in
text from others `&`, `<` and `>` are escaped, and a section holds at most 3,000 characters.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from evalstop_service.rules.event_types import EventType
from evalstop_service.rules.run_results import BestCheckpoint, Verdict
from evalstop_service.webhooks.event_data import Decision, Guard, Policy, Project, RolloutStage, Run
from evalstop_service.webhooks.events import DECLARATIONS

MAX_TEXT_CHARACTERS = 600


class _Data(Struct):
    """What a message mentions, of any type of event."""

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


def render_message(body: str) -> str:
    """The message for an event that is given as endpoints of the standard format get it; JSON both."""
    event = msgspec.json.decode(body, type=_Event)
    text = _headline(event)
    blocks = [_section(text)]
    blocks += [_section(f"*{name}*: {_escape(detail)}") for name, detail in _details(event.data)]
    context = [*map(_escape, _context(event)), *([f"<{event.url}|Open in EvalStop>"] if event.url else [])]
    blocks.append({"type": "context", "elements": [_mrkdwn(" · ".join(context))]})
    return msgspec.json.encode({"text": text, "blocks": blocks}).decode()


def _headline(event: _Event) -> str:
    data = event.data
    if data.run is not None:
        return f"*{_escape(data.run.name)}* {DECLARATIONS[event.type].headline}"
    if data.policy is not None and data.rollout_stage is not None:
        stage = data.rollout_stage
        headline = DECLARATIONS[event.type].headline
        return f"The policy *{_escape(data.policy.name)}* {headline} from {stage.from_stage} to {stage.to}"
    return f"EvalStop can reach this channel ({event.type})"


def _details(data: _Data) -> list[tuple[str, str]]:
    details = []
    cause = data.verdict or data.rollout_stage
    if cause is not None and cause.reason:
        details.append(("Reason", cause.reason))
    if data.guards:
        details.append(("Guards", "; ".join(guard.reason for guard in data.guards)))
    if data.best_checkpoint is not None:
        details.append(("Best checkpoint", f"step {data.best_checkpoint.step}, {data.best_checkpoint.uri}"))
    return details


def _context(event: _Event) -> list[str]:
    parts = [str(event.type), f"project {event.data.project.name}", event.timestamp]
    return parts + ([f"decision {event.data.decision.id}"] if event.data.decision else [])


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _mrkdwn(text)}


def _mrkdwn(text: str) -> dict[str, str]:
    return {"type": "mrkdwn", "text": text}


def _escape(text: str) -> str:
    """Text from others as one line that Slack shows as it is."""
    line = " ".join(text.split())
    cut = line if len(line) <= MAX_TEXT_CHARACTERS else line[: MAX_TEXT_CHARACTERS - 1] + "…"
    return cut.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
