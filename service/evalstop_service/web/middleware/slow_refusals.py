"""Delays refusals to an address that gets many, so that it does not use up the processor.

Otherwise a flood that retries immediately after each 401 or 429 would be answered as fast as the process can. Accepted
requests are never delayed.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope

from evalstop_service.security.rate_limits import Rate, RateLimit

PROMPT_REFUSALS = Rate(burst=20, per_second=5)
"""Refusals of an address that are answered at once."""

PAUSE_SECONDS = 1.0

REFUSED = frozenset({401, 429})


class SlowRefusals:
    """Delays a refusal by a second if its address has had more than `PROMPT_REFUSALS`."""

    def __init__(self, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._pause_seconds = pause_seconds
        self._limit = RateLimit(PROMPT_REFUSALS)

    async def delay(self, scope: Scope) -> None:
        """Wait before a refused request is answered."""
        address = scope["client"][0] if scope.get("client") else ""
        if self._limit.spend(address):
            await asyncio.sleep(self._pause_seconds)
