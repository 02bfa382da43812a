"""How long to wait before the next try."""

from __future__ import annotations

import random

from evalstop_client.service import Refused, Unauthorized, Unavailable

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0
LONGEST_ASKED_SECONDS = 300.0


def wait_seconds(failures: int, chance: float, retry_after_seconds: float | None = None) -> float:
    """Seconds to wait after `failures` (>= 1) failed tries in a row: doubles, with `chance` in [0, 1) as jitter.

    Waits at least `retry_after_seconds` (Retry-After), up to five minutes.
    """
    doubled = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures - 1, 30))
    jittered = doubled * (0.5 + chance / 2)
    if retry_after_seconds is None:
        return jittered
    return max(jittered, min(retry_after_seconds, LONGEST_ASKED_SECONDS))


REFUSED_SECONDS = 30.0
"""Pause between retries while the service does not know the endpoint or the key."""


def seconds_after(answer: Refused | Unauthorized | Unavailable, failures: int) -> float:
    """Seconds to wait after `failures` (>= 1) failed tries in a row and this last answer."""
    requested_seconds = answer.retry_after_seconds if isinstance(answer, Unavailable) else REFUSED_SECONDS
    return wait_seconds(failures, random.random(), requested_seconds)
