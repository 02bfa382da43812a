"""Listens for PostgreSQL notifications of commits that create work for the delivery workers.

A connection pooler may accept LISTEN and never forward a notification, and a connection may be dead without either
end noticing. So the listener tests itself: it regularly sends a notification over another connection, and `receives`
is true only while these arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable

import psycopg
import sqlalchemy as sa

from evalstop_service.store.database import WAKEUP_CHANNEL

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0


class NotificationListener:
    """`await NotificationListener(url, wake).run()` listens until cancelled, on its own connection, and reconnects.

    `wake` is called on the loop for each notification, and whenever `receives` changes. `check_seconds`: between two
    test notifications; `answer_seconds`: how long one may take.
    """

    def __init__(
        self, url: sa.URL, wake: Callable[[], None], *, check_seconds: float = 15.0, answer_seconds: float = 5.0
    ) -> None:
        self.receives = False
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._wake = wake
        self._check_seconds = check_seconds
        self._answer_seconds = answer_seconds

    async def run(self) -> None:
        """Listen until cancelled; retries after errors, each time after a longer pause."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            received = False
            try:
                async with await self._connect() as connection:
                    await connection.execute(f"LISTEN {WAKEUP_CHANNEL}")
                    received = await self._listen(connection)
                    reason = "notifications do not arrive, as behind a pooler"
            except (psycopg.Error, OSError, TimeoutError) as error:
                received, reason = self.receives, f"{type(error).__name__}: {error}".strip()
            finally:
                self._change(False)
            pause = FIRST_PAUSE_SECONDS if received else min(pause * 2, LONGEST_PAUSE_SECONDS)
            log.warning("cannot listen for PostgreSQL notifications (%s); polling, retrying in %.1f s", reason, pause)
            await asyncio.sleep(pause)

    async def _listen(self, connection: psycopg.AsyncConnection) -> bool:
        """Wake the worker for each notification until test notifications stop arriving; returns whether any arrived."""
        while True:
            token = uuid.uuid4().hex
            await self._notify(token)
            if not await self._receive(connection, self._answer_seconds, token):
                return self.receives
            self._change(True)
            await self._receive(connection, self._check_seconds, None)

    async def _receive(self, connection: psycopg.AsyncConnection, seconds: float, token: str | None) -> bool:
        """Wake the worker for each notification, until the one with the token arrives or the time is over."""
        deadline = time.monotonic() + seconds
        while (remaining_seconds := deadline - time.monotonic()) > 0:
            async for notification in connection.notifies(timeout=remaining_seconds, stop_after=1):
                if notification.payload == token:
                    return True
                if not notification.payload:  # others carry the tokens of other listeners
                    self._wake()
        return False

    async def _notify(self, token: str) -> None:
        async with await self._connect() as connection:
            await connection.execute("SELECT pg_notify(%s, %s)", (WAKEUP_CHANNEL, token))

    async def _connect(self) -> psycopg.AsyncConnection:
        async with asyncio.timeout(self._answer_seconds):
            return await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True, prepare_threshold=None)

    def _change(self, receives: bool) -> None:
        if receives != self.receives:
            self.receives = receives
            if receives:
                log.info("receiving PostgreSQL notifications")
            self._wake()  # claim the deliveries that were missed meanwhile


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
