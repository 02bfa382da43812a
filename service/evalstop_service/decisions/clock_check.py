"""Compares this machine's clock with PostgreSQL's, and corrects it in this process if it is behind.

A process that answers requests sets the ends of veto windows and the deadlines by its own clock, and they pass by
PostgreSQL's: if its clock were behind, they would be too early. Delivery workers take the time from PostgreSQL alone.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.clock import Clock, CorrectedClock
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.database import Database
from evalstop_service.store.queue import queues

log = logging.getLogger(__name__)

CHECK_SECONDS = 60.0
"""The time between two checks."""

CORRECTED_SECONDS = 1.0
"""How far the clock may be behind without a correction."""

TOLERATED_SECONDS = 5.0
"""The difference of the clocks above which a check logs a warning."""


def create_job(database: Database, clock: CorrectedClock, service_metrics: ServiceMetrics) -> PeriodicJob:
    """The periodic job that reports how far the machine's clock is behind, and corrects the given one."""

    def check(_pause: Wait) -> float:
        behind = measure_lag(database, clock.uncorrected)
        clock.correction = timedelta(seconds=behind if behind > CORRECTED_SECONDS else 0)
        service_metrics.clock_behind_seconds.set(behind)
        if abs(behind) > TOLERATED_SECONDS:
            relation, effect = ("behind", "corrected") if behind > 0 else ("ahead of", "veto windows are longer")
            log.warning(
                "this machine's clock is %.1f s %s PostgreSQL's, and %s by as much; synchronize both machines by NTP",
                *(abs(behind), relation, effect),
            )
        return CHECK_SECONDS

    return PeriodicJob("clock", check)


def measure_lag(database: Database, clock: Clock) -> float:
    """How many seconds the clock is behind PostgreSQL's at least, below 0 if it is ahead."""
    with database.reading() as tx:
        before = clock()
        there, _ = queues.read_clock(tx, before)
        after = clock()
    if there > after:
        return (there - after).total_seconds()
    return min(0.0, (there - before).total_seconds())
