"""One transaction of a worker: it hands in what became of its attempts and takes out what is due.

Attempts that end while a transaction is under way are handed in together by the next one, so that the database commits
in groups which grow with the load, and nobody waits for a group to fill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from evalstop_service.clock import Clock
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import decisions
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import leases, queues
from evalstop_service.store.queue.breakers import BreakerLimits
from evalstop_service.store.queue.leases import ClaimedDelivery, FinishedAttempt, Settlement


@dataclass(frozen=True)
class Wanted:
    """What a worker has room for: `limit` in all, `per_endpoint` for one endpoint, unless `room` says otherwise."""

    limit: int
    per_endpoint: int
    room: Mapping[UUID, int]
    lease_seconds: float


@dataclass(frozen=True)
class Exchanged:
    """What came of it. `next_due`: when something comes due that is not yet; told only when nothing was claimed."""

    now: datetime
    settled: Settlement
    claimed: Sequence[ClaimedDelivery]
    next_due: datetime | None


@dataclass(frozen=True)
class Rules:
    """By what all transactions of a worker go: when an endpoint is left alone, and what opens its secrets."""

    breaker: BreakerLimits
    encryption: Encryption


NOTHING_SETTLED = Settlement(frozenset(), frozenset())


def exchange(
    database: Database, clock: Clock, rules: Rules, ended: Sequence[FinishedAttempt], wanted: Wanted
) -> Exchanged:
    """Settle what has ended, let decisions come due, and claim; all of it or nothing."""
    if database.embedded and not ended:
        idle = _look(database, clock, wanted)
        if idle is not None:
            return idle
    with database.transaction() as tx:
        settled = leases.settle_deliveries(tx, ended, rules.breaker)
        # The time is asked for after what may have waited for a lock, so that a lease begins when it is written.
        now, over = queues.read_clock(tx, clock())
        if over:
            decisions.request_due_decisions(tx, now)
        claimed = leases.claim_deliveries(
            tx, now, wanted.lease_seconds, wanted.limit, wanted.per_endpoint, wanted.room, rules.encryption
        )
        return Exchanged(now, settled, claimed, _next_due(tx, now, claimed))


def settle(database: Database, rules: Rules, ended: Sequence[FinishedAttempt]) -> Settlement:
    """Settle what has ended and claim nothing."""
    with database.transaction() as tx:
        return leases.settle_deliveries(tx, ended, rules.breaker)


def _look(database: Database, clock: Clock, wanted: Wanted) -> Exchanged | None:
    """Whether there is nothing to do: a look, so that idle workers leave SQLite's one lock for writing alone."""
    with database.reading() as tx:
        now, over = queues.read_clock(tx, clock())
        due = (
            queues.find_due_deliveries(tx, now, wanted.limit, wanted.per_endpoint, wanted.room)
            if wanted.limit > 0
            else []
        )
        if due or over:
            return None
        return Exchanged(now, NOTHING_SETTLED, (), _next_due(tx, now, ()))


def _next_due(tx: Transaction, now: datetime, claimed: Sequence[ClaimedDelivery]) -> datetime | None:
    return None if claimed else queues.find_next_due(tx, now)
