"""The content of messages to people, for every channel: a headline, details, and the context. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from evalstop_service.domain.decision_lifecycle import Guard
from evalstop_service.domain.event_types import PENDING_EVENTS, EventType
from evalstop_service.domain.metric_rules import RuleBreach
from evalstop_service.domain.run import BestCheckpoint, Verdict
from evalstop_service.domain.times import format_duration
from evalstop_service.webhooks.event_data import Alert, Decision, Digest, Policy, Project, RolloutStage, Run
from evalstop_service.webhooks.events import DECLARATIONS

MAX_TEXT_CHARACTERS = 600

ACT = "Veto it, or have it wait"


class _Data(Struct):
    """The fields that messages mention, of every event type."""

    project: Project
    run: Run | None = None
    verdict: Verdict | None = None
    best_checkpoint: BestCheckpoint | None = None
    decision: Decision | None = None
    gpu_hours_left: float | None = None
    act_from_messages: bool = False
    guards: list[Guard] = []
    policy: Policy | None = None
    rollout_stage: RolloutStage | None = None
    rule: RuleBreach | None = None
    alert: Alert | None = None
    digest: Digest | None = None


class _Event(Struct):
    type: EventType
    timestamp: datetime
    data: _Data
    url: str | None = None


@dataclass(frozen=True)
class Message:
    """Texts of one line each.

    `context`: project and time. `url`: the page of the run or policy, if known. `act_url`: the page where people can
    veto the stop, if they can.
    """

    headline: str
    details: tuple[str, ...]
    context: str
    url: str | None
    act_url: str | None


def read_message(body: str, act_url: str | None = None) -> Message:
    """The message for an event, given in the standard format."""
    event = msgspec.json.decode(body, type=_Event)
    return Message(
        _write_headline(event),
        tuple(f"{title}: {_to_one_line(detail)}" for title, detail in _list_details(event)),
        f"{_to_one_line(f'project {event.data.project.name}')} · {_format_time(event.timestamp)}",
        event.url,
        act_url if event.data.act_from_messages else None,
    )


def _write_headline(event: _Event) -> str:
    data, headline = event.data, DECLARATIONS[event.type].headline
    if data.run is not None:
        return f"{_to_one_line(data.run.name)} {headline}"
    if data.policy is not None and data.rollout_stage is not None:
        stage = data.rollout_stage
        return f"The policy {data.policy.name} {headline} from {stage.from_stage} to {stage.to}"
    if (digest := data.digest) is not None:
        saved = f"{digest.stops} stops, {digest.gpu_hours_saved:,.0f} GPU-hours saved"
        return f"{_to_one_line(data.project.name)}, {headline} {digest.until:%Y-%m-%d}: {saved}"
    return "EvalStop can reach this channel"


def _list_details(event: _Event) -> list[tuple[str, str]]:
    """What a person needs in order to decide, the owner first; nothing that only programs read."""
    data, run, best = event.data, event.data.run, event.data.best_checkpoint
    if data.digest is not None:
        return _list_figures(data.digest)
    cause = data.verdict or data.rollout_stage
    details = {
        "Owner": run and run.owner,
        "Rule": data.rule and f"{data.rule.rule}: {data.rule.reason}",
        "Alert": data.alert and f"{data.alert.title}: {data.alert.text}",
        "When": _describe_end(event),
        "Reason": data.verdict.reason_in_words if data.verdict else cause and cause.reason,
        "Guards": "; ".join(guard.reason for guard in data.guards),
        "Step": run and _describe_progress(run),
        "Best checkpoint": best and f"step {best.step:,}, score {best.score:.4g}, {best.uri}",
        "GPU-hours left": data.gpu_hours_left is not None and f"{data.gpu_hours_left:,.1f}",
    }
    return [(title, detail) for title, detail in details.items() if detail]


def _list_figures(digest: Digest) -> list[tuple[str, str]]:
    unknown = digest.stops - digest.right - digest.wrong
    return [
        ("Stops carried out", f"{digest.stops}: {digest.right} right, {digest.wrong} false, {unknown} not known"),
        (
            "Recorded only",
            f"{digest.recorded_only}, would have saved {digest.gpu_hours_would_have_saved:,.1f} GPU-hours",
        ),
        ("Vetoed", str(digest.vetoes)),
        ("GPU-hours", f"{digest.gpu_hours_saved:,.1f} saved, about {digest.gpu_hours_lost:,.1f} lost to false stops"),
        ("To label", str(digest.to_label)),
        ("Ready for the next stage", "; ".join(digest.ready) or "no policy"),
    ]


def _describe_end(event: _Event) -> str | None:
    """When a pending stop goes out, and how long that is from the event."""
    if event.type not in PENDING_EVENTS or event.data.decision is None:
        return None
    due_at = event.data.decision.due_at
    return f"{_format_time(due_at)}, {format_duration((due_at - event.timestamp).total_seconds())} after this message"


def _describe_progress(run: Run) -> str | None:
    if run.last_step is None:
        return None
    return f"{run.last_step:,}" + (f" of {run.total_steps:,} planned" if run.total_steps is not None else "")


def _format_time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _to_one_line(text: str) -> str:
    """Untrusted text as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_CHARACTERS else line[: MAX_TEXT_CHARACTERS - 1] + "…"
