"""Events for Microsoft Teams' workflows and incoming webhooks: an Adaptive Card. Pure.

Source: the reference of Adaptive Cards, version 1.4. Text runs (`TextRun`) do not render Markdown, so untrusted text
is shown unchanged.
"""

from __future__ import annotations

from typing import Any

import msgspec

from evalstop_service.webhooks.channels.message import ACT, read_message


def render_message(body: str, act_url: str | None = None) -> str:
    """Render an event, given in the standard format, as a Teams message; both are JSON."""
    message = read_message(body, act_url)
    headline = [_run(message.before), _run(message.name, weight="Bolder"), _run(message.after)]
    blocks = [_build_block([run for run in headline if run["text"]])]
    blocks += [_build_block([_run(f"{title}: ", weight="Bolder"), _run(detail)]) for title, detail in message.details]
    blocks.append(_build_block([_run(" · ".join(message.context), isSubtle=True, size="Small")]))
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": blocks,
    }
    actions = [(ACT, message.act_url), ("Open in EvalStop", message.url)]
    if opened := [{"type": "Action.OpenUrl", "title": title, "url": url} for title, url in actions if url]:
        card["actions"] = opened
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return msgspec.json.encode({"type": "message", "attachments": [attachment]}).decode()


def _build_block(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": runs}


def _run(text: str, **style: object) -> dict[str, Any]:
    return {"type": "TextRun", "text": text, **style}
