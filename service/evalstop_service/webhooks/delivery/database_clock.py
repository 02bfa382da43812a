"""The database's time, extrapolated between readings with a monotonic clock. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

TOLERANCE_SECONDS = 1.0
"""Clocks drift apart a little between two readings; a clock that was set back differs by more."""


class DatabaseClock:
    """Set at each transaction. `monotonic`: seconds, as `time.monotonic` counts them."""

    def __init__(self) -> None:
        self._reading: tuple[datetime, float] | None = None

    def set_time(self, now: datetime, monotonic: float) -> bool:
        """Record a reading; returns whether the database's clock was set back since the previous one."""
        expected = self.now(monotonic) if self._reading is not None else now
        self._reading = (now, monotonic)
        return now < expected - timedelta(seconds=TOLERANCE_SECONDS)

    def now(self, monotonic: float) -> datetime:
        """The time at that moment, as if the clock had not been set since the last reading."""
        assert self._reading is not None, "the time was never set"
        time, at = self._reading
        return time + timedelta(seconds=monotonic - at)
