"""Parses `since`: a time, or how long ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from evalstop_client.errors import ConfigurationError

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_since(since: str | datetime | timedelta, now: datetime) -> datetime:
    """The time that `since` means; raises ConfigurationError. A time without a time zone is UTC.

    >>> parse_since("30d", datetime(2026, 1, 31, tzinfo=UTC)).isoformat()
    '2026-01-01T00:00:00+00:00'
    """
    try:
        if isinstance(since, timedelta):
            return now - since
        if isinstance(since, str):
            if past := re.fullmatch(r"([0-9]{1,6})([mhdw])", since.strip()):
                return now - timedelta(**{UNITS[past[2]]: int(past[1])})
            since = datetime.fromisoformat(since.strip())
        return since if since.tzinfo is not None else since.replace(tzinfo=UTC)
    except (ValueError, OverflowError, TypeError, AttributeError):
        raise ConfigurationError(
            f"since {since!r}: write a time such as 2026-01-31, or a period: 45m, 12h, 30d."
        ) from None
