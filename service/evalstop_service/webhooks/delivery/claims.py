"""What a worker claims: its transaction, which records finished attempts and claims due deliveries, and the deliveries
that it has claimed but not started, one queue per endpoint.

For an endpoint that accepted its last event the worker claims ahead, so that the next event is ready when an attempt
finishes. For one that fails or has not answered yet it claims only what can start now: the rest stays available to
other workers and can still be cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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


class _Queue:
    """The deliveries to one endpoint."""

    __slots__ = ("accepts", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[ClaimedDelivery] = deque()
        self.running = 0
        self.accepts = False


class EndpointQueues:
    """At most `concurrency` attempts run, `per_endpoint` of them to one endpoint; `ahead` times as many may wait."""

    def __init__(self, concurrency: int, per_endpoint: int, ahead: int) -> None:
        self._concurrency = concurrency
        self._per_endpoint = per_endpoint
        self._ahead = ahead
        self._queues: dict[UUID, _Queue] = {}
        self._empty: list[UUID] = []  # when the limits were last computed
        self._turns: deque[_Queue] = deque()  # queues with waiting deliveries; the first is next
        self._waiting = 0
        self._running = 0

    @property
    def running(self) -> int:
        """How many attempts are running."""
        return self._running

    @property
    def runs_low(self) -> bool:
        """Whether less than half of what may be claimed ahead is waiting."""
        return 2 * self._waiting <= self._concurrency * self._ahead

    def claim_limit(self) -> int:
        """How many more deliveries to claim in all."""
        accepts = any(queue.accepts for queue in self._queues.values())
        return max(0, self._concurrency * (1 + self._ahead * accepts) - self._waiting - self._running)

    def claim_limits_by_endpoint(self) -> dict[UUID, int]:
        """How many more to claim for each endpoint that has a queue; `per_endpoint` for any other."""
        self._empty = [endpoint for endpoint, queue in self._queues.items() if not queue.running and not queue.waiting]
        return {
            endpoint: self._per_endpoint * (1 + self._ahead * queue.accepts) - queue.running - len(queue.waiting)
            for endpoint, queue in self._queues.items()
        }

    def add_claimed(self, claimed: Iterable[ClaimedDelivery]) -> None:
        """Add claimed deliveries in sending order.

        Queues that were empty and for which nothing was claimed are removed.
        """
        for delivery in claimed:
            queue = self._queues.setdefault(delivery.endpoint_id, _Queue())
            if not queue.waiting:
                self._turns.append(queue)
            queue.waiting.append(delivery)
            self._waiting += 1
        for endpoint in self._empty:
            if not self._queues[endpoint].waiting:
                del self._queues[endpoint]
        self._empty = []

    def start_next(self) -> ClaimedDelivery | None:
        """The next delivery to send, counted as running; endpoints take turns. None when none can start."""
        if self._running >= self._concurrency:
            return None
        for _ in range(len(self._turns)):
            queue = self._turns.popleft()
            delivery = queue.waiting.popleft() if queue.running < self._per_endpoint else None
            if queue.waiting:
                self._turns.append(queue)
            if delivery is not None:
                queue.running += 1
                self._waiting -= 1
                self._running += 1
                return delivery
        return None

    def finish_attempt(self, delivery: ClaimedDelivery, accepted: bool) -> None:
        """Count an attempt as finished; `accepted`: the endpoint accepted the event."""
        queue = self._queues[delivery.endpoint_id]
        queue.running -= 1
        queue.accepts = accepted
        self._running -= 1

    def remove_waiting(self, endpoint: UUID) -> list[ClaimedDelivery]:
        """Remove the deliveries to one endpoint that have not started."""
        queue = self._queues.get(endpoint)
        if queue is None or not queue.waiting:
            return []
        removed = [*queue.waiting]
        queue.waiting.clear()
        self._turns.remove(queue)
        self._waiting -= len(removed)
        return removed

    def remove_all_waiting(self) -> list[ClaimedDelivery]:
        """Remove all deliveries that have not started."""
        removed = [delivery for queue in self._turns for delivery in queue.waiting]
        for queue in self._turns:
            queue.waiting.clear()
        self._turns.clear()
        self._waiting = 0
        return removed
