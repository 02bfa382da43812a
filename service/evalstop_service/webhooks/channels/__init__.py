"""The formats in which endpoints take events: one module a format. Pure."""

from __future__ import annotations

from enum import StrEnum

from evalstop_service.webhooks.channels import slack


class Format(StrEnum):
    """How the body of an event is written for an endpoint."""

    STANDARD = "standard"
    SLACK = "slack"


def render_body(endpoint_format: str, body: str) -> str:
    """The body of an event in the format of an endpoint."""
    return slack.render_message(body) if endpoint_format == Format.SLACK else body
