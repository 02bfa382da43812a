"""How long a receiver waits after a failed request to the service."""

from __future__ import annotations

import random

from evalstop_client.backoff import wait_seconds
from evalstop_client.service import Refused, Unauthorized, Unavailable

REFUSED_SECONDS = 30.0
"""Pause between retries while the service does not know the endpoint or the key."""


def seconds_after(answer: Refused | Unauthorized | Unavailable, failures: int) -> float:
    """Seconds to wait after `failures` (>= 1) failed tries in a row and this last answer."""
    requested_seconds = answer.retry_after_seconds if isinstance(answer, Unavailable) else REFUSED_SECONDS
    return wait_seconds(failures, random.random(), requested_seconds)
