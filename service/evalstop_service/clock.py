"""The clock, and the text form of times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The current time, in UTC."""
    return datetime.now(UTC)


class CorrectedClock:
    """A clock that adds `correction`, which is set when it is found to be behind."""

    def __init__(self, clock: Clock) -> None:
        self.uncorrected = clock
        self.correction = timedelta(0)

    def __call__(self) -> datetime:
        return self.uncorrected() + self.correction


def in_utc(moment: datetime) -> datetime:
    """A time in UTC, assumed where it has no time zone; raises ValueError outside the years 1 to 9999 in UTC."""
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("it must be between the years 1 and 9999 in UTC") from error


def rfc3339(moment: datetime) -> str:
    """A time as RFC 3339 text in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
