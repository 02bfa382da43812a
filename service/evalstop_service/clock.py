"""The clock and how a moment is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The present moment, in UTC."""
    return datetime.now(UTC)


def in_utc(moment: datetime) -> datetime:
    """A moment in UTC, which it is taken for where it names no zone; raises ValueError for what lies outside of its
    years 1 to 9999."""
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("a time between the years 1 and 9999 in UTC") from error


def rfc3339(moment: datetime) -> str:
    """A moment as RFC 3339 in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
