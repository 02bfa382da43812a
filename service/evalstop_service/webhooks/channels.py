"""The formats in which endpoints receive events, and the URLs of e-mail endpoints. Pure.

Slack's incoming webhooks get a text of several lines. Source:
https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks and its page on formatting text: `&`, `<` and
`>` are escaped in untrusted text.

Microsoft Teams' workflows and incoming webhooks get an Adaptive Card. Source: the reference of Adaptive Cards, version
1.4. Text runs (`TextRun`) do not render Markdown, so untrusted text is shown unchanged.

An e-mail is the subject, an empty line, and the text. The URL of an e-mail endpoint is `mailto:ADDRESS`, or
`mailto:owner` for the owner of each run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from evalstop_service.webhooks.message import ACT, Message, read_message

SCHEME, OWNER = "mailto:", "owner"

_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", re.ASCII)


class Format(StrEnum):
    """The format of event bodies for an endpoint."""

    STANDARD = "standard"
    SLACK = "slack"
    TEAMS = "teams"
    EMAIL = "email"


def render_body(endpoint_format: str, body: str, act_url: str | None = None) -> str:
    """The body of an event in the format of an endpoint.

    `act_url`: the page where people can veto the stop; only messages about a pending stop hold it.
    """
    return body if endpoint_format == Format.STANDARD else _RENDER[endpoint_format](read_message(body, act_url))


def is_address(text: str) -> bool:
    """Whether a text is a single bare e-mail address: no display name, no list, no line breaks."""
    return len(text) <= 254 and _ADDRESS.fullmatch(text) is not None


def is_mail_url(url: str) -> bool:
    """Whether a URL is that of an e-mail endpoint."""
    recipient = url.removeprefix(SCHEME)
    return recipient != url and (recipient == OWNER or is_address(recipient))


def _render_email(message: Message) -> str:
    act = [f"{ACT}: {message.act_url}"] if message.act_url else []
    lines = [message.headline, "", f"{message.headline}.", *message.details, *act]
    lines += [message.url] if message.url else []
    return "\n".join([*lines, "", message.context, ""])


def _render_slack(message: Message) -> str:
    lines = [_escape(text) for text in (message.headline, *message.details)]
    lines += [f"<{message.act_url}|{ACT}>"] if message.act_url else []
    link = f" · <{message.url}|Open in EvalStop>" if message.url else ""
    text = "\n".join([*lines, _escape(message.context) + link])
    return msgspec.json.encode({"text": text}).decode()


def _escape(text: str) -> str:
    """Escape untrusted text, so that Slack shows it unchanged."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _render_teams(message: Message) -> str:
    lines = (message.headline, *message.details, message.context)
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [{"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": line}]} for line in lines],
    }
    actions = [(ACT, message.act_url), ("Open in EvalStop", message.url)]
    if opened := [{"type": "Action.OpenUrl", "title": title, "url": url} for title, url in actions if url]:
        card["actions"] = opened
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return msgspec.json.encode({"type": "message", "attachments": [attachment]}).decode()


_RENDER: dict[str, Callable[[Message], str]] = {
    Format.SLACK: _render_slack,
    Format.TEAMS: _render_teams,
    Format.EMAIL: _render_email,
}
