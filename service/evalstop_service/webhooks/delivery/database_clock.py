"""The database's time between readings, and repairs after it was set back.

A delivery that was never attempted becomes due immediately. One that was attempted may be leased to a worker: it
becomes due once it has not changed for the longest lease, by a monotonic clock. A setback shorter than the longest
pause before a retry cannot be distinguished from such a pause, and lengthens it by at most as much.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from evalstop_service.store.database import Database
from evalstop_service.store.queue import pull, queues
from evalstop_service.store.queue.queues import DueDelivery

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


log = logging.getLogger(__name__)


class ClockSkewRepair:
    """`longest_seconds`: the longest lease or pause of a worker; `lease_seconds`: its longest lease.

    Receivers of pull endpoints choose their leases themselves.
    """

    def __init__(self, longest_seconds: float, lease_seconds: float) -> None:
        self._longest_seconds = max(longest_seconds, pull.MAX_LEASE_SECONDS)
        self._lease_seconds = lease_seconds
        self._checked_at: float | None = None
        self._first_seen: dict[DueDelivery, float] = {}

    def is_due(self, set_back: bool, monotonic: float) -> bool:
        """Whether to check: at the start, when the clock was set back, and once per lease."""
        return set_back or self._checked_at is None or monotonic - self._checked_at >= self._lease_seconds

    def repair_due_times(self, database: Database, now: datetime, monotonic: float) -> bool:
        """Make deliveries with wrong due times due; returns whether there were any."""
        self._checked_at = monotonic
        with database.reading() as tx:
            misdated = queues.find_misdated(tx, now, self._longest_seconds)
        self._first_seen = {
            delivery: self._first_seen.get(delivery, monotonic) for delivery in misdated if delivery.attempts
        }
        ready = [
            delivery
            for delivery in misdated
            if not delivery.attempts or monotonic - self._first_seen[delivery] >= self._lease_seconds
        ]
        if ready:
            with database.transaction() as tx:
                queues.make_due(tx, ready, now)
            log.warning("the database's clock was set back: %d deliveries are due now", len(ready))
        return bool(ready)
