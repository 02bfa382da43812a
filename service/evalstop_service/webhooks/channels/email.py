"""Events as e-mail: the subject, an empty line, and the text. Pure."""

from __future__ import annotations

from evalstop_service.webhooks.channels.message import read_message


def render_message(body: str) -> str:
    """Render an event, given in the standard format, as an e-mail."""
    message = read_message(body)
    details = [f"{title}: {detail}" for title, detail in message.details]
    lines = [message.headline, "", f"{message.headline}.", *details, *([message.url] if message.url else [])]
    return "\n".join([*lines, "", " · ".join(message.context), ""])
