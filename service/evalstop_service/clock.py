"""The clock, and the text form of times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The current time, in UTC."""
    return datetime.now(UTC)


def in_utc(moment: datetime) -> datetime:
    """A time in UTC, assumed where it has no time zone; raises ValueError outside the years 1 to 9999 in UTC."""
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("it must be between the years 1 and 9999 in UTC") from error


def rfc3339(moment: datetime) -> str:
    """A time as RFC 3339 text in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
