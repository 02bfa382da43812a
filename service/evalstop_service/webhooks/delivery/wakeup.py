"""A bell that any thread may ring and one task on a loop waits for."""

from __future__ import annotations

import asyncio
import contextlib


class Bell:
    """Rung once or many times, it wakes its one waiter once; rung while nobody waits, it wakes the next at once."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ring(self) -> None:
        """Ring, from any thread; harmless when nobody waits any more."""
        if self._loop is None:
            self._rung.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._rung.set)

    def ring_here(self) -> None:
        """Ring, from the thread of the loop."""
        self._rung.set()

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait until it is rung, at most so long; whether it was."""
        self._loop = asyncio.get_running_loop()
        if not self._rung.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(timeout_seconds, 0.0)):
                    await self._rung.wait()
        rung = self._rung.is_set()
        self._rung.clear()
        return rung
