"""Events as e-mail: the subject, an empty line, and the text. Pure."""

from __future__ import annotations

from evalstop_service.webhooks.channels.message import ACT, read_message


def render_message(body: str, act_url: str | None = None) -> str:
    """Render an event, given in the standard format, as an e-mail."""
    message = read_message(body, act_url)
    details = [f"{title}: {detail}" for title, detail in message.details]
    details += [f"{ACT}: {message.act_url}"] if message.act_url else []
    lines = [message.headline, "", f"{message.headline}.", *details, *([message.url] if message.url else [])]
    return "\n".join([*lines, "", " · ".join(message.context), ""])
