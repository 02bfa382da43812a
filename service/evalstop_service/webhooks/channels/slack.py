"""Events for Slack's incoming webhooks: a short text, and blocks with details. Pure.

Source: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks and its page on formatting text: `&`,
`<` and `>` are escaped in untrusted text, and a section holds at most 3,000 characters.
"""

from __future__ import annotations

from typing import Any

import msgspec

from evalstop_service.webhooks.channels.message import ACT, read_message


def render_message(body: str, act_url: str | None = None) -> str:
    """Render an event, given in the standard format, as a Slack message; both are JSON."""
    message = read_message(body, act_url)
    name = f"*{_escape(message.name)}*" if message.name else ""
    text = f"{message.before}{name}{message.after}"
    blocks = [_build_section(text)]
    blocks += [_build_section(f"*{title}*: {_escape(detail)}") for title, detail in message.details]
    if message.act_url:
        blocks.append(_build_section(f"<{message.act_url}|{ACT}>"))
    context = [*map(_escape, message.context), *([f"<{message.url}|Open in EvalStop>"] if message.url else [])]
    blocks.append({"type": "context", "elements": [_build_text(" · ".join(context))]})
    return msgspec.json.encode({"text": text, "blocks": blocks}).decode()


def _build_section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _build_text(text)}


def _build_text(text: str) -> dict[str, str]:
    return {"type": "mrkdwn", "text": text}


def _escape(text: str) -> str:
    """Escape untrusted text, so that Slack shows it unchanged."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
