"""Rate limits: one token bucket for each client."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

MOST_BUCKETS = 10_000
"""Beyond this number, the least recently used bucket is dropped, and its client starts with a full one."""


@dataclass(frozen=True)
class Rate:
    """`burst` at once, and `per_second` in the long run."""

    burst: float
    per_second: float


class RateLimit:
    """Token buckets of many clients, with the same rate for all. Thread-safe."""

    def __init__(self, rate: Rate, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # tokens left, and since when

    def spend(self, who: Hashable, cost: float = 1.0) -> float:
        """Spend `cost` tokens and return 0, or spend nothing and return the seconds to wait.

        A cost above the bucket's size needs a full bucket and leaves a debt.
        """
        with self._lock:
            now = self._monotonic()
            left = self._read(who, now)
            missing = min(cost, self.rate.burst) - left
            if missing > 0:
                return missing / self.rate.per_second
            self._keep(who, left - cost, now)
            return 0.0

    def charge(self, who: Hashable, cost: float) -> None:
        """Spend tokens for work already done; the balance may become negative."""
        with self._lock:
            now = self._monotonic()
            self._keep(who, self._read(who, now) - cost, now)

    def find_wait(self, who: Hashable) -> float:
        """The seconds until one token is available, without spending it."""
        with self._lock:
            return max(0.0, (1.0 - self._read(who, self._monotonic())) / self.rate.per_second)

    def _read(self, who: Hashable, now: float) -> float:
        left, since = self._buckets.get(who, (self.rate.burst, now))
        return min(self.rate.burst, left + (now - since) * self.rate.per_second)

    def _keep(self, who: Hashable, left: float, now: float) -> None:
        self._buckets[who] = left, now
        self._buckets.move_to_end(who)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
