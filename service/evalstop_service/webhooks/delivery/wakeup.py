"""Wakes the worker's task."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """A flag that one task waits for. Setting it many times, or while no task waits, has the same effect as once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake the task, from the thread of its event loop."""
        self._event.set()

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait to be woken, at most `timeout_seconds`; returns whether it was."""
        if not self._event.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(timeout_seconds, 0.0)):
                    await self._event.wait()
        woken = self._event.is_set()
        self._event.clear()
        return woken
