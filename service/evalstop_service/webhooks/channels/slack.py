"""Events as Slack's incoming webhooks take them: a short text, and blocks that say more. Pure.

Source: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks and its page on formatting text: of
what is not ours `&`, `<` and `>` are escaped, and a section holds at most 3,000 characters.
"""

from __future__ import annotations

import json
from typing import Any

SAID = {
    "run.suspected": "may no longer get better",
    "run.eval_requested": "should be evaluated now",
    "run.stop_requested": "is to be stopped",
    "run.stop_on_hold": "should be stopped, and is not: something speaks against it",
    "run.stop_escalated": "is to be stopped, and nobody has confirmed that it was",
    "run.stopped": "was stopped",
    "run.stop_failed": "could not be stopped. Somebody has to look after it",
    "run.resume_requested": "is to go on: its stop was taken back",
    "run.best_checkpoint_changed": "has a new best checkpoint",
    "run.stale": "has gone silent",
    "run.lost": "has been silent for so long that it is taken for lost",
    "detector.dead": "is no longer watched as it should be",
    "endpoint.test": "",
}
"""What an event says of its run."""

LONGEST = 600


def rendered(form: str, body: str) -> str:
    """The body of an event as an endpoint of this format gets it."""
    return render_message(body) if form == "slack" else body


def render_message(body: str) -> str:
    """The message for an event, given as it is sent to everybody else; JSON both."""
    event = json.loads(body)
    data = event["data"]
    if "run" in data:
        text = f"*{_plain(data['run']['name'])}* {SAID.get(event['type'], event['type'])}"
    elif "rollout_stage" in data:
        moved = data["rollout_stage"]
        text = f"The policy *{_plain(data['policy']['name'])}* moves from {moved['from']} to {moved['to']}"
    else:
        text = f"EvalStop can reach this channel ({_plain(event['type'])})"
    blocks: list[dict[str, Any]] = [_section(text)]
    blocks += [_section(f"*{name}*: {_plain(said)}") for name, said in _details(data)]
    blocks.append({"type": "context", "elements": [_mrkdwn(" · ".join(map(_plain, _about(event))))]})
    return json.dumps({"text": text, "blocks": blocks}, separators=(",", ":"))


def _details(data: dict[str, Any]) -> list[tuple[str, str]]:
    """What there is to say beyond the one line."""
    found = []
    if reason := (data.get("verdict") or data.get("rollout_stage") or {}).get("reason"):
        found.append(("Why", reason))
    held = [guard.get("reason", "") for guard in data.get("guards") or [] if isinstance(guard, dict)]
    if held:
        found.append(("Against it", "; ".join(held)))
    if best := data.get("best_checkpoint"):
        found.append(("Best checkpoint", f"step {best['step']}, {best['uri']}"))
    return found


def _about(event: dict[str, Any]) -> list[str]:
    data = event["data"]
    decision = data.get("decision")
    parts = [event["type"], f"project {data['project']['name']}", event["timestamp"]]
    return parts + ([f"decision {decision['id']}"] if decision else [])


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _mrkdwn(text)}


def _mrkdwn(text: str) -> dict[str, str]:
    return {"type": "mrkdwn", "text": text}


def _plain(text: str) -> str:
    """Somebody else's words: one line without meaning to Slack."""
    line = " ".join(str(text).split())
    cut = line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
    return cut.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
