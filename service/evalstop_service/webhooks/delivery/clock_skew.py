"""Finds what would have to wait for a clock that was set back, and makes it due.

Deliveries never tried are due at once. One that was tried may be in the hands of a worker: it is made due once it has
been seen unchanged for as long as any lease lasts, counted by a clock that nobody sets. Setbacks shorter than the
longest pause before a retry cannot be told from such a pause, and lengthen it by as much at most.
"""

from __future__ import annotations

import logging
from datetime import datetime

from evalstop_service.store.database import Database
from evalstop_service.store.queue import queues
from evalstop_service.store.queue.queues import DueDelivery

log = logging.getLogger(__name__)


class Setback:
    """`longest_seconds`: as long as any lease or pause lasts; `lease_seconds`: as long as any lease does."""

    def __init__(self, longest_seconds: float, lease_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self._lease_seconds = lease_seconds
        self._looked: float | None = None
        self._seen: dict[DueDelivery, float] = {}

    def is_due(self, back: bool, monotonic: float) -> bool:
        """Whether to look: at first, when the clock went `back`, and once in a while."""
        return back or self._looked is None or monotonic - self._looked >= self._lease_seconds

    def mend(self, database: Database, now: datetime, monotonic: float) -> bool:
        """Look, and make due what was left behind; whether anything was."""
        self._looked = monotonic
        with database.reading() as tx:
            found = queues.find_misdated(tx, now, self._longest_seconds)
        self._seen = {one: self._seen.get(one, monotonic) for one in found if one.attempts}
        ready = [one for one in found if not one.attempts or monotonic - self._seen[one] >= self._lease_seconds]
        if ready:
            with database.transaction() as tx:
                queues.make_due(tx, ready, now)
            log.warning("the clock was set back: %d deliveries that it left behind are due now", len(ready))
        return bool(ready)
