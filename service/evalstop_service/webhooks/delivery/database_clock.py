"""The time that due times are compared with, carried on between two looks by a clock that nobody can set. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

TOLERANCE_SECONDS = 1.0
"""Two clocks drift apart a little between two looks; a clock that was set back is off by more."""


class Timekeeper:
    """Told the time at each look. `monotonic`: seconds, counted from any moment, by `time.monotonic`."""

    def __init__(self) -> None:
        self._told: tuple[datetime, float] | None = None

    def tell(self, now: datetime, monotonic: float) -> bool:
        """Take note of the time; whether it was set back since it was told last."""
        expected = self.now(monotonic) if self._told is not None else now
        self._told = (now, monotonic)
        return now < expected - timedelta(seconds=TOLERANCE_SECONDS)

    def now(self, monotonic: float) -> datetime:
        """The time at that moment, as if the clock had not been touched since it was told."""
        assert self._told is not None, "the time was never told"
        moment, at = self._told
        return moment + timedelta(seconds=monotonic - at)
