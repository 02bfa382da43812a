"""Listens on PostgreSQL for the commits that leave the workers something to do.

A pooler between us and PostgreSQL may take the LISTEN and never pass a notification on, and a connection may be dead
without either end having been told. So what counts is what is heard: every now and then a notification is sent by
another connection, and only as long as these arrive does `hears` hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

import psycopg
import sqlalchemy as sa

from evalstop_service.store.wakeup import CHANNEL

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0


class Listener:
    """`await Listener(url, ring).run()` listens until cancelled, on a connection of its own, made anew when it breaks.

    `ring` is called on the loop for each notification, and whenever `hears` changes. `check_seconds`: between two
    notifications sent to ourselves; `answer_seconds`: as long as such a one may take.
    """

    def __init__(
        self, url: sa.URL, ring: Callable[[], None], *, check_seconds: float = 15.0, answer_seconds: float = 5.0
    ) -> None:
        self.hears = False
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._ring = ring
        self._check_seconds = check_seconds
        self._answer_seconds = answer_seconds

    async def run(self) -> None:
        """Listen until cancelled; whatever breaks is tried again, each time after a longer pause."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            heard = False
            try:
                async with await self._connect() as connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    heard = await self._listen(connection)
                    why = "notifications do not arrive, as behind a pooler"
            except (psycopg.Error, OSError, TimeoutError) as error:
                heard, why = self.hears, f"{type(error).__name__}: {error}".strip()
            finally:
                self._change(False)
            pause = FIRST_PAUSE_SECONDS if heard else min(pause * 2, LONGEST_PAUSE_SECONDS)
            log.warning("cannot listen to PostgreSQL (%s); polling, and trying again in %.1f s", why, pause)
            await asyncio.sleep(pause)

    async def _listen(self, connection: psycopg.AsyncConnection) -> bool:
        """Ring for what is heard until our own notification stays away; whether any of those arrived."""
        while True:
            token = uuid.uuid4().hex
            await self._notify(token)
            if not await self._hear(connection, self._answer_seconds, token):
                return self.hears
            self._change(True)
            await self._hear(connection, self._check_seconds, None)

    async def _hear(self, connection: psycopg.AsyncConnection, seconds: float, token: str | None) -> bool:
        """Ring for what is heard for so long, or until the notification that carries the token."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            async for notification in connection.notifies(timeout=left, stop_after=1):
                if notification.payload == token:
                    return True
                if not notification.payload:  # the tokens of other listeners are no news
                    self._ring()
        return False

    async def _notify(self, token: str) -> None:
        async with await self._connect() as connection:
            await connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, token))

    async def _connect(self) -> psycopg.AsyncConnection:
        async with asyncio.timeout(self._answer_seconds):
            return await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True, prepare_threshold=None)

    def _change(self, hears: bool) -> None:
        if hears != self.hears:
            self.hears = hears
            if hears:
                log.info("woken by PostgreSQL")
            self._ring()  # what was missed meanwhile is looked for
