"""Each sender's share of a process's resources, so that one that floods it leaves room for the others.

| share | of | concurrent, or over time |
|---|---|---|
| requests | the threads that answer requests, 40 | 16 per key; 32 for trainers' requests, since many trainers share a
key |
| pulls | waiting receivers, 200 | 100 per key |
| streams | streams of JSON lines, `EVALSTOP_STREAMS` | half of them per key |
| event streams | open pages, 200 | 20 per session |
| costly | tests of endpoints, replays, backtests and new policies | 30 at once, then one every 2 s, per key |

Ingestion has separate shares: of bodies (`middleware.held_bodies`), of the event loop (`loop_shares`), and of replays
(`ingest.costs`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evalstop_service.errors import TooOften
from evalstop_service.security.rate_limits import Rate, RateLimit

RETRY_SECONDS = 1.0

COSTLY = Rate(burst=30, per_second=0.5)

THREADS = 40
"""The size of AnyIO's thread pool, in which sync routes run."""


class Places:
    """Counts the places that each sender holds, at most `most_per_sender`, however many are free. Thread-safe."""

    def __init__(self, name: str, most_per_sender: int, refused: Callable[[str], object]) -> None:
        self._name, self._most_per_sender, self._refused = name, most_per_sender, refused
        self._lock = threading.Lock()
        self._held_places: Counter[str] = Counter()

    def has_room(self, sender: str) -> bool:
        """Whether this sender may hold another place."""
        with self._lock:
            return self._held_places[sender] < self._most_per_sender

    @contextmanager
    def hold(self, sender: str) -> Iterator[None]:
        """Hold a place until the block ends; raises TooOften when the sender has none left."""
        with self._lock:
            if self._held_places[sender] >= self._most_per_sender:
                self._refused(self._name)
                raise TooOften(
                    f"{self._most_per_sender} {self._name} are in progress, the most for one sender; "
                    "wait for one to end",
                    RETRY_SECONDS,
                )
            self._held_places[sender] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held_places[sender] -= 1
                if not self._held_places[sender]:
                    del self._held_places[sender]


class FairShares:
    """The shares of one process; `streams`: the most concurrent streams of lines. `refused` counts by share."""

    def __init__(self, streams: int = 8, refused: Callable[[str], object] = lambda _: None) -> None:
        self.count_refused = refused
        self.requests = Places("requests", 16, refused)
        self.reports = Places("reports", 32, refused)
        self.pulls = Places("pulls", 100, refused)
        self.streams = Places("streams", max(1, streams // 2), refused)
        self.event_streams = Places("event streams", 20, refused)
        self._costly = RateLimit(COSTLY)

    def spend_costly(self, sender: str) -> None:
        """Count a costly request of a sender; raises TooOften when there were too many."""
        if wait := self._costly.spend(sender):
            self.count_refused("costly")
            raise TooOften("too many costly requests; wait before you send another", wait)
