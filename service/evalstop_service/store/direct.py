"""A few connections to PostgreSQL in the hands of an event loop, for the one statement that is hottest.

No thread, no pool and no transaction stands between the loop and the socket: libpq sends, and the loop is told when the
answer is there. Whatever goes wrong is answered with None: what became of it is not known here, and the thorough way,
which finds out, also knows what to do about it.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable

import psycopg
from psycopg import pq

from evalstop_service.store.compare_and_save import COMPARE_AND_SAVE
from evalstop_service.store.database import Database, prepare_postgres

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
_NAME = b"compare_and_save"

Saved = Callable[[bool | None], None]
"""Told what became of a stroke: it is durable; nothing of it was written, since a run has moved on; or it failed."""


class Direct:
    """At most `most` connections to a database on PostgreSQL; to be used on the loop that it was opened on."""

    def __init__(self, database: Database, most: int, ready: Callable[[], None]) -> None:
        self._database, self._most, self._ready = database, most, ready
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._opening: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is any connection, idle or not."""
        return bool(self._open)

    @property
    def is_idle(self) -> bool:
        """Whether a stroke can be begun at once."""
        return bool(self._idle)

    def save(self, parameters: list[bytes], saved: Saved) -> None:
        """Begin to save a stroke with these parameters on an idle connection; `saved` is called on the loop, later."""
        self._idle.pop().send(parameters, saved)

    async def open(self) -> None:
        """Try to open all connections; those that cannot be opened now are tried again for as long as it takes."""
        await self._open_one_try()
        self._open_the_rest()

    async def close(self) -> None:
        """Close all connections; what is under way on one is answered with None."""
        self._most = 0
        for connection in list(self._open):
            connection.lose()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])

    def _open_the_rest(self) -> None:
        if len(self._open) < self._most and self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._keep_opening())

    async def _keep_opening(self) -> None:
        try:
            while len(self._open) < self._most:
                await asyncio.sleep(_PAUSE_SECONDS)
                await self._open_one_try()
        finally:
            self._opening = None

    async def _open_one_try(self) -> None:
        while len(self._open) < self._most:
            connecting = asyncio.ensure_future(asyncio.to_thread(self._connect))
            try:
                connected = await asyncio.shield(connecting)
                connection = _Connection(connected, self._idle.append, self._lost)
            except psycopg.Error as error:
                _log.warning("no direct connection to the database (%s); commits go through the pool", error)
                _discard(connecting)
                return
            except asyncio.CancelledError:  # closed meanwhile; a thread cannot be
                await asyncio.wait([connecting])
                _discard(connecting)
                raise
            self._open.add(connection)
            self._idle.append(connection)
            self._ready()

    def _connect(self) -> psycopg.Connection:
        url = self._database.url.set(drivername="postgresql").render_as_string(hide_password=False)
        connection = psycopg.connect(url, autocommit=True)
        try:
            prepare_postgres(connection)
            # Made once for any values: a plan for those at hand would be thrown away after the statement.
            connection.execute("SET plan_cache_mode TO force_generic_plan")
            prepared = connection.pgconn.prepare(_NAME, COMPARE_AND_SAVE.encode())
            if prepared.status != pq.ExecStatus.COMMAND_OK:
                raise psycopg.OperationalError(prepared.error_message.decode(errors="replace"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._open_the_rest()
        self._ready()


def _discard(connecting: asyncio.Future[psycopg.Connection]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


class _Connection:
    """One connection, with at most one statement under way."""

    def __init__(
        self,
        connection: psycopg.Connection,
        free: Callable[[_Connection], None],
        lost: Callable[[_Connection], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection, self._libpq = connection, connection.pgconn
        self._socket = self._libpq.socket
        self._failed = select.poll()
        self._failed.register(self._socket, 0)  # errors and the end are told unasked, and nothing else
        self._libpq.nonblocking = 1
        self._free, self._lost = free, lost
        self._saved: Saved | None = None
        self._result: bool | None = None
        self._given_up = False
        self._loop.add_reader(self._socket, self._read)

    def send(self, parameters: list[bytes], saved: Saved) -> None:
        self._saved, self._result = saved, None
        try:
            self._libpq.send_query_prepared(_NAME, parameters)
            self._flush()
        except psycopg.Error as error:
            self._saved = None
            self._loop.call_soon(saved, None)
            self.lose(error)

    def lose(self, error: psycopg.Error | None = None) -> None:
        """Give the connection up, at once: libpq may have closed the socket, whose number is the next one's to have."""
        if self._given_up:
            return
        self._given_up = True
        if error is not None:
            _log.warning("a direct connection to the database is lost (%s)", error)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._connection.close()
        saved, self._saved = self._saved, None
        if saved is not None:
            saved(None)
        self._lost(self)

    def _flush(self) -> None:
        if self._libpq.flush():
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        try:
            if not self._libpq.flush():
                self._loop.remove_writer(self._socket)
        except psycopg.Error as error:
            self.lose(error)

    def _read(self) -> None:
        try:
            busy = self._take_in()
            # The loop calls no more once the socket has reported an error, however much is left to be read (uvloop's
            # way): a server's farewell may still stand before the end that libpq has to come upon.
            while self._failed.poll(0):
                busy = self._take_in()
        except psycopg.Error as error:
            self.lose(error)
            return
        if self._libpq.status != pq.ConnStatus.OK:
            self.lose(psycopg.OperationalError(self._libpq.error_message.decode(errors="replace")))
        elif not busy and self._saved is not None:
            saved, self._saved = self._saved, None
            self._free(self)
            saved(self._result)

    def _take_in(self) -> bool:
        """Take in what has come; whether more has to come before the statement is done with."""
        self._libpq.consume_input()
        while not self._libpq.is_busy():
            result = self._libpq.get_result()
            if result is None:
                return False
            self._take(result)
        return True

    def _take(self, result: pq.abc.PGresult) -> None:
        if result.status == pq.ExecStatus.TUPLES_OK:
            self._result = result.get_value(0, 0) == b"t"
        else:
            state = result.error_field(pq.DiagnosticField.SQLSTATE) or b"?"
            _log.warning("a direct commit failed (%s); it goes through the pool", state.decode(errors="replace"))
