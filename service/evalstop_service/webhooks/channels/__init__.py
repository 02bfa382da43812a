"""The formats in which endpoints receive events, one module each. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from evalstop_service.webhooks.channels import email, slack, teams


class Format(StrEnum):
    """The format of event bodies for an endpoint."""

    STANDARD = "standard"
    SLACK = "slack"
    TEAMS = "teams"
    EMAIL = "email"


_RENDER: dict[str, Callable[[str, str | None], str]] = {
    Format.STANDARD: lambda body, _act_url: body,
    Format.SLACK: slack.render_message,
    Format.TEAMS: teams.render_message,
    Format.EMAIL: email.render_message,
}


def render_body(endpoint_format: str, body: str, act_url: str | None = None) -> str:
    """The body of an event in the format of an endpoint.

    `act_url`: the page on which people can veto the stop; only messages about a pending stop hold it.
    """
    return _RENDER[endpoint_format](body, act_url)
