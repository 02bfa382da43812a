"""A worker's transaction: records finished attempts and claims due deliveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from evalstop_service.clock import Clock
from evalstop_service.security.encryption import Encryption
from evalstop_service.store.database import Database, Transaction, read_now
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import BreakerLimits, ClaimedDelivery, FinishedAttempt
from evalstop_service.store.queue.leases import Settlement


@dataclass(frozen=True)
class ClaimLimits:
    """How many deliveries to claim: `limit` in all, `per_endpoint` for each endpoint that is not in `room`."""

    limit: int
    per_endpoint: int
    room: Mapping[UUID, int]
    lease_seconds: float


@dataclass(frozen=True)
class ClaimResult:
    """The settled and claimed deliveries. `next_due`: when the next delivery is due, if nothing was claimed."""

    now: datetime
    settled: Settlement
    claimed: Sequence[ClaimedDelivery]
    next_due: datetime | None


@dataclass(frozen=True)
class DeliveryRules:
    """Shared by all transactions of a worker: when to pause a failing endpoint, and the key that decrypts secrets."""

    breaker: BreakerLimits
    encryption: Encryption


NOTHING_SETTLED = Settlement(frozenset(), frozenset())


def settle_and_claim(
    database: Database, clock: Clock, rules: DeliveryRules, finished: Sequence[FinishedAttempt], limits: ClaimLimits
) -> ClaimResult:
    """In one transaction:

    1. Settle the attempts first: the deliveries that they release can be claimed immediately.
    2. Read the clock after settling, which may wait for a lock, so that a lease begins when it is written.
    3. Claim what is due, and hand over the stops among it.
    """
    if database.embedded and not finished:
        idle = _check_idle(database, clock, limits)
        if idle is not None:
            return idle
    with database.transaction() as tx:
        settled = leases.settle_deliveries(tx, finished, rules.breaker)
        now = read_now(tx, clock)
        claimed = leases.claim_deliveries(
            tx, now, limits.lease_seconds, limits.limit, limits.per_endpoint, limits.room, rules.encryption
        )
        return ClaimResult(now, settled, claimed, _find_next_due(tx, now, claimed))


def settle_attempts(database: Database, rules: DeliveryRules, finished: Sequence[FinishedAttempt]) -> Settlement:
    """Settle attempts and claim nothing."""
    with database.transaction() as tx:
        return leases.settle_deliveries(tx, finished, rules.breaker)


def _check_idle(database: Database, clock: Clock, limits: ClaimLimits) -> ClaimResult | None:
    """An empty result when there is nothing to do. A read, so that idle workers do not take SQLite's write lock."""
    with database.reading() as tx:
        now = read_now(tx, clock)
        due = (
            leases.find_due_deliveries(tx, now, limits.limit, limits.per_endpoint, limits.room)
            if limits.limit > 0
            else []
        )
        if due:
            return None
        return ClaimResult(now, NOTHING_SETTLED, (), _find_next_due(tx, now, ()))


def _find_next_due(tx: Transaction, now: datetime, claimed: Sequence[ClaimedDelivery]) -> datetime | None:
    return None if claimed else leases.find_next_due(tx, now)
