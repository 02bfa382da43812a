"""The deliveries that a worker has claimed but not started, one queue per endpoint, and how many to claim. Pure.

For an endpoint that accepted its last event the worker claims ahead, so that the next event is ready when an attempt
finishes. For one that fails or has not answered yet it claims only what can start now: the rest stays available to
other workers and can still be cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from uuid import UUID

from evalstop_service.store.queue.attempts import ClaimedDelivery


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
