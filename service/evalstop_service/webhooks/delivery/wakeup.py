"""Wakes the worker's task from any thread."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """A flag that one task waits for. Setting it many times, or while no task waits, has the same effect as once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        """Wake the task from the thread of its event loop."""
        self._event.set()

    def wake_threadsafe(self) -> None:
        """Wake the task from any thread; has no effect once the event loop is closed."""
        if self._loop is None:
            self._event.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait to be woken, at most `timeout_seconds`; returns whether it was."""
        self._loop = asyncio.get_running_loop()
        if not self._event.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(timeout_seconds, 0.0)):
                    await self._event.wait()
        woken = self._event.is_set()
        self._event.clear()
        return woken
