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

    def spend(self, key: Hashable, cost: float = 1.0) -> float:
        """Spend `cost` tokens and return 0, or spend nothing and return the seconds to wait.

        A cost above the bucket's size needs a full bucket and leaves a debt.
        """
        with self._lock:
            now = self._monotonic()
            tokens = self._compute_tokens(key, now)
            missing = min(cost, self.rate.burst) - tokens
            if missing > 0:
                return missing / self.rate.per_second
            self._store_tokens(key, tokens - cost, now)
            return 0.0

    def charge(self, key: Hashable, cost: float) -> None:
        """Spend tokens for work already done; the balance may become negative."""
        with self._lock:
            now = self._monotonic()
            self._store_tokens(key, self._compute_tokens(key, now) - cost, now)

    def find_wait(self, key: Hashable) -> float:
        """The seconds until one token is available, without spending it."""
        with self._lock:
            return max(0.0, (1.0 - self._compute_tokens(key, self._monotonic())) / self.rate.per_second)

    def _compute_tokens(self, key: Hashable, now: float) -> float:
        tokens, since = self._buckets.get(key, (self.rate.burst, now))
        return min(self.rate.burst, tokens + (now - since) * self.rate.per_second)

    def _store_tokens(self, key: Hashable, tokens: float, now: float) -> None:
        self._buckets[key] = tokens, now
        self._buckets.move_to_end(key)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
