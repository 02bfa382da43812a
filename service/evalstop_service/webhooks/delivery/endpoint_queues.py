"""What a worker has claimed and not yet begun, an endpoint's queue each, and how much more it should claim. Pure.

An endpoint that took the last event it was sent is claimed for ahead of time, so that the next event is at hand when an
attempt ends; one that fails or has yet to answer is claimed for only as far as attempts can begin, so that what waits
for it stays free for other workers and for changes of mind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from uuid import UUID

from evalstop_service.store.queue.leases import ClaimedDelivery


class _Line:
    """What is held of one endpoint."""

    __slots__ = ("prompt", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[ClaimedDelivery] = deque()
        self.under_way = 0
        self.prompt = False


class Backlog:
    """At most `concurrency` attempts under way, `per_endpoint` to one endpoint, and `ahead` times as many at hand."""

    def __init__(self, concurrency: int, per_endpoint: int, ahead: int) -> None:
        self._concurrency = concurrency
        self._per_endpoint = per_endpoint
        self._ahead = ahead
        self._lines: dict[UUID, _Line] = {}
        self._idle: list[UUID] = []  # of which nothing was held when it was last asked what to claim
        self._turns: deque[_Line] = deque()  # of endpoints for which something waits: whoever's turn it is comes first
        self._waits = 0
        self._under_way = 0

    @property
    def under_way(self) -> int:
        """How many attempts have begun and not ended."""
        return self._under_way

    @property
    def runs_low(self) -> bool:
        """Whether less than half is at hand of what may be claimed ahead of time."""
        return 2 * self._waits <= self._concurrency * self._ahead

    def limit(self) -> int:
        """How many more to claim in all."""
        prompt = any(line.prompt for line in self._lines.values())
        return max(0, self._concurrency * (1 + self._ahead * prompt) - self._waits - self._under_way)

    def room(self) -> dict[UUID, int]:
        """How many more to claim for each endpoint of which any was held; `per_endpoint` for all others."""
        self._idle = [key for key, line in self._lines.items() if not line.under_way and not line.waiting]
        return {
            endpoint: self._per_endpoint * (1 + self._ahead * line.prompt) - line.under_way - len(line.waiting)
            for endpoint, line in self._lines.items()
        }

    def add(self, claimed: Iterable[ClaimedDelivery]) -> None:
        """Take in what was claimed, in the order in which it is to be sent to its endpoint.

        An endpoint of which nothing was held, and for which nothing was claimed, is a stranger again.
        """
        for one in claimed:
            line = self._lines.setdefault(one.endpoint_id, _Line())
            if not line.waiting:
                self._turns.append(line)
            line.waiting.append(one)
            self._waits += 1
        for endpoint in self._idle:
            if not self._lines[endpoint].waiting:
                del self._lines[endpoint]
        self._idle = []

    def begin(self) -> ClaimedDelivery | None:
        """The next for which there is room, under way from now on; endpoints take turns. None: nothing can begin."""
        if self._under_way >= self._concurrency:
            return None
        for _ in range(len(self._turns)):
            line = self._turns.popleft()
            fits = line.under_way < self._per_endpoint
            one = line.waiting.popleft() if fits else None
            if line.waiting:
                self._turns.append(line)
            if one is not None:
                line.under_way += 1
                self._waits -= 1
                self._under_way += 1
                return one
        return None

    def end(self, claimed: ClaimedDelivery, prompt: bool) -> None:
        """An attempt is over; `prompt`: the endpoint took the event."""
        line = self._lines[claimed.endpoint_id]
        line.under_way -= 1
        line.prompt = prompt
        self._under_way -= 1

    def give_up(self, endpoint: UUID) -> list[ClaimedDelivery]:
        """Give up what has not begun of one endpoint."""
        line = self._lines.get(endpoint)
        if line is None or not line.waiting:
            return []
        given = [*line.waiting]
        line.waiting.clear()
        self._turns.remove(line)
        self._waits -= len(given)
        return given

    def clear(self) -> list[ClaimedDelivery]:
        """Give up all that has not begun."""
        given = [one for line in self._turns for one in line.waiting]
        for line in self._turns:
            line.waiting.clear()
        self._turns.clear()
        self._waits = 0
        return given
