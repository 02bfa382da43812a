"""How long a receiver waits when the service does not give what it asked for."""

from __future__ import annotations

import random

from evalstop_client.backoff import wait_seconds
from evalstop_client.service import Refused, Unauthorized, Unavailable

REFUSED_SECONDS = 30.0
"""Between tries while the service does not know the endpoint or the key."""


def seconds_after(answer: Refused | Unauthorized | Unavailable, failures: int) -> float:
    """Seconds to wait after so many (>= 1) tries in a row, the last of which was answered so."""
    asked = answer.retry_after_seconds if isinstance(answer, Unavailable) else REFUSED_SECONDS
    return wait_seconds(failures, random.random(), asked)
