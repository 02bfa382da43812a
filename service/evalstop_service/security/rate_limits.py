"""How often somebody may do what: token buckets, one for each of those who do it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST_BUCKETS = 10_000
"""Whoever did it longest ago starts with a full bucket when there are more."""


@dataclass(frozen=True)
class Rate:
    """`burst` at once, and `per_second` in the long run."""

    burst: float
    per_second: float


class RateLimit:
    """Counts what each of many spends, by a rate that is the same for all. For any thread."""

    def __init__(self, rate: Rate, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and since when

    def spend(self, who: str, cost: float = 1.0) -> float:
        """Spend so much; the seconds to wait if there is not so much left, and nothing is spent then.

        What costs more than the whole bucket is had for a full one, and is owed.
        """
        with self._lock:
            now = self._monotonic()
            left = self._read(who, now)
            missing = min(cost, self.rate.burst) - left
            if missing > 0:
                return missing / self.rate.per_second
            self._keep(who, left - cost, now)
            return 0.0

    def charge(self, who: str, cost: float) -> None:
        """Spend so much that was done already; what is not left is owed."""
        with self._lock:
            now = self._monotonic()
            self._keep(who, self._read(who, now) - cost, now)

    def find_wait(self, who: str) -> float:
        """The seconds until one can be spent, without spending it."""
        with self._lock:
            return max(0.0, (1.0 - self._read(who, self._monotonic())) / self.rate.per_second)

    def _read(self, who: str, now: float) -> float:
        left, since = self._buckets.get(who, (self.rate.burst, now))
        return min(self.rate.burst, left + (now - since) * self.rate.per_second)

    def _keep(self, who: str, left: float, now: float) -> None:
        self._buckets[who] = left, now
        self._buckets.move_to_end(who)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
