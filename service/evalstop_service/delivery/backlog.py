"""What a worker has claimed and not yet begun, an endpoint's queue each, and how much more it should claim. Pure.

An endpoint that took the last event it was sent is claimed for ahead of time, so that the next event is at hand when an
attempt ends; one that fails or has yet to answer is claimed for only as far as attempts can begin, so that what waits
for it stays free for other workers and for changes of mind.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from uuid import UUID

from evalstop_service.store.leases import Claimed


class Backlog:
    """At most `concurrency` attempts under way, `per_endpoint` to one endpoint, and `ahead` times as many at hand."""

    def __init__(self, concurrency: int, per_endpoint: int, ahead: int) -> None:
        self._concurrency = concurrency
        self._per_endpoint = per_endpoint
        self._ahead = ahead
        self._waiting: OrderedDict[UUID, deque[Claimed]] = OrderedDict()
        self._waits = 0
        self._under_way: Counter[UUID] = Counter()
        self._busy = 0
        self._prompt: set[UUID] = set()

    def __len__(self) -> int:
        """How many are held: at hand or under way."""
        return self._waits + self._busy

    @property
    def under_way(self) -> int:
        """How many attempts have begun and not ended."""
        return self._busy

    def limit(self) -> int:
        """How many more to claim in all."""
        return self._concurrency * (1 + (self._ahead if self._prompt else 0)) - len(self)

    def room(self) -> dict[UUID, int]:
        """How many more to claim for each endpoint of which any is held; `per_endpoint` for all others."""
        return {
            endpoint: self._per_endpoint * (1 + (self._ahead if endpoint in self._prompt else 0))
            - self._under_way[endpoint]
            - len(self._waiting.get(endpoint, ()))
            for endpoint in self._under_way.keys() | self._waiting.keys()
        }

    def add(self, claimed: Iterable[Claimed]) -> None:
        """Take in what was claimed, in the order in which it is to be sent to its endpoint."""
        for one in claimed:
            self._waiting.setdefault(one.endpoint_id, deque()).append(one)
            self._waits += 1

    def begin(self) -> Claimed | None:
        """The next for which there is room, under way from now on; endpoints take turns. None: nothing can begin."""
        if self._busy >= self._concurrency:
            return None
        for endpoint, queue in self._waiting.items():
            if self._under_way[endpoint] < self._per_endpoint:
                one = queue.popleft()
                if queue:
                    self._waiting.move_to_end(endpoint)
                else:
                    del self._waiting[endpoint]
                self._waits -= 1
                self._busy += 1
                self._under_way[endpoint] += 1
                return one
        return None

    def end(self, claimed: Claimed, prompt: bool) -> None:
        """An attempt is over; `prompt`: the endpoint took the event."""
        endpoint = claimed.endpoint_id
        self._busy -= 1
        self._under_way[endpoint] -= 1
        if not self._under_way[endpoint]:
            del self._under_way[endpoint]
        held = endpoint in self._under_way or endpoint in self._waiting
        if prompt and held:
            self._prompt.add(endpoint)
        else:
            self._prompt.discard(endpoint)

    def clear(self) -> list[Claimed]:
        """Give up all that has not begun."""
        given = [one for queue in self._waiting.values() for one in queue]
        self._waiting.clear()
        self._waits = 0
        return given
