"""What ingestion reads and saves, as one asynchronous interface to both databases.

On PostgreSQL: asyncpg on the event loop, and one statement that compares versions and saves; a save without
consequences is this one statement, one round trip. On the embedded database: in one thread, since SQLite has one writer
and its calls block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

import asyncpg
import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from evalstop_service.domain.run import Verdict
from evalstop_service.store.database import IS_POOLED, Database, Transaction, save_row
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import moment_text, monitor_states
from evalstop_service.store.tables.runs import StoredMonitorState as StoredMonitorState

T = TypeVar("T")

FollowUp = Callable[[Transaction, Collection[UUID]], None]
"""Writes the consequences for the saved runs, in the transaction that saves them."""


class RunChange(msgspec.Struct, frozen=True):
    """A run as it was loaded, the run to save, and its new observations.

    `IngestStore.save` writes the columns that most requests change; `runs.save_changes` writes all that differ.
    """

    before: Run
    run: Run
    points: Sequence[PostedObservation]


class IngestStore(Protocol):
    """The database as ingestion uses it, from one event loop."""

    async def read(self, query: Callable[[Transaction], T]) -> T:
        """The result of a query. Its statements need not share a snapshot."""

    async def save(self, changes: Sequence[RunChange], now: datetime, follow_up: FollowUp | None) -> Collection[UUID]:
        """Save, in one transaction, each run whose version is unchanged, with all its observations; returns their ids.

        Raises DBAPIError. If its connection was lost, the transaction may have been committed.
        """

    async def close(self) -> None:
        """Close all connections."""


def changed_json(before: object, after: object) -> str | None:
    """A JSON column to write. None: leave it, or it becomes NULL, which `save_changes` writes."""
    if after is before or after is None:
        return None
    return msgspec.json.encode(after.for_json if isinstance(after, Verdict) else after).decode()


# By the driver's own means: the same in SQLAlchemy Core takes 1.4 times as long for one run, 1.9 times for 32.
_UPDATE = """
UPDATE runs SET version = version + 1, updated_at = ?, last_step = ?, verdict = coalesce(?, verdict),
    best_checkpoint = coalesce(?, best_checkpoint), raw_maximum = coalesce(?, raw_maximum)
WHERE id = ? AND version = ?
"""

_INSERT = """
INSERT INTO observations (run_id, metric, step, superseded_by, value, stderr, attempt, observed_at, received_at)
VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?)
"""


class SqliteIngest:
    """An `IngestStore` on SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, "ingest")

    async def read(self, query: Callable[[Transaction], T]) -> T:
        """See `IngestStore`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_query, query)

    async def save(self, changes: Sequence[RunChange], now: datetime, follow_up: FollowUp | None) -> Collection[UUID]:
        """See `IngestStore`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._save_changes, changes, now, follow_up)

    async def close(self) -> None:
        """See `IngestStore`."""
        self._thread.shutdown()

    def _read_query(self, query: Callable[[Transaction], T]) -> T:
        with self._database.reading() as tx:
            return query(tx)

    def _save_changes(
        self, changes: Sequence[RunChange], now: datetime, follow_up: FollowUp | None
    ) -> Collection[UUID]:
        at = moment_text(now)
        with self._database.transaction() as tx:
            saved = [change for change in changes if _update_run(tx, change, at)]
            rows = [
                (
                    change.run.id.hex,
                    point.metric,
                    point.step,
                    point.value if point.value == point.value else None,
                    point.stderr,
                    change.run.attempt,
                    None if point.time is None else moment_text(point.time),
                    at,
                )
                for change in saved
                for point in change.points
            ]
            if rows:
                tx.exec_driver_sql(_INSERT, rows)
            run_ids = {change.run.id for change in saved}
            if follow_up is not None:
                follow_up(tx, run_ids)
        return run_ids


def _update_run(tx: Transaction, change: RunChange, at: str) -> bool:
    before, run = change.before, change.run
    values = (
        at,
        run.last_step,
        changed_json(before.verdict, run.verdict),
        changed_json(before.best_checkpoint, run.best_checkpoint),
        changed_json(before.raw_maximum, run.raw_maximum),
        run.id.hex,
        before.version,
    )
    return tx.exec_driver_sql(_UPDATE, values).rowcount == 1


# Rows are compared once they are locked. PostgreSQL locks them by ascending id, so that two concurrent saves of the
# same runs wait for each other in order; a deadlock is retried. In SQLAlchemy Core, several statements, the save of one
# run takes 1.9 times as long, of 32 runs 5 times. Rows as JSON instead of arrays save the service 8 us a post, and cost
# PostgreSQL 11.
SAVE = """
WITH moved AS (
    UPDATE runs SET
        version = runs.version + 1,
        updated_at = $1,
        last_step = new.last_step,
        verdict = coalesce(new.verdict::json, runs.verdict),
        best_checkpoint = coalesce(new.best_checkpoint::json, runs.best_checkpoint),
        raw_maximum = coalesce(new.raw_maximum::json, runs.raw_maximum)
    FROM unnest($2::uuid[], $3::integer[], $4::bigint[], $5::text[], $6::text[], $7::text[])
        AS new (id, version, last_step, verdict, best_checkpoint, raw_maximum)
    WHERE runs.id = new.id AND runs.version = new.version
    RETURNING runs.id, runs.attempt
), added AS (
    INSERT INTO observations
        (run_id, metric, step, superseded_by, value, stderr, attempt, observed_at, received_at)
    SELECT moved.id, new.metric, new.step, 0, new.value, new.stderr, moved.attempt, new.observed_at::timestamptz, $1
    FROM unnest($8::uuid[], $9::text[], $10::bigint[], $11::double precision[], $12::double precision[],
        $13::text[]) AS new (run_id, metric, step, value, stderr, observed_at)
    JOIN moved ON moved.id = new.run_id
)
SELECT id FROM moved
"""


# A connection that the server is about to close raises InternalClientError.
_FAILURES = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    AsyncAdapt_asyncpg_dbapi.Error,
)


class _Connection(NamedTuple):
    """One connection as SQLAlchemy and as asyncpg see it, in autocommit: asyncpg manages transactions."""

    wrapped: AsyncConnection
    raw: asyncpg.Connection[asyncpg.Record]


class PostgresIngest:
    """An `IngestStore` on PostgreSQL. Connections are opened on demand and kept open."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._engine: AsyncEngine | None = None
        self._idle: list[_Connection] = []
        self._free = asyncio.Semaphore(database.posting_connections)

    async def read(self, query: Callable[[Transaction], T]) -> T:
        """See `IngestStore`."""
        async with self._borrow_connection() as connection:
            return await connection.wrapped.run_sync(_run_in_block(query))

    async def save(self, changes: Sequence[RunChange], now: datetime, follow_up: FollowUp | None) -> Collection[UUID]:
        """See `IngestStore`."""
        arguments = save_arguments(changes, now)
        async with self._borrow_connection() as connection:
            if follow_up is None and not self._database.learned[IS_POOLED]:
                return {row[0] for row in await connection.raw.fetch(SAVE, *arguments)}
            async with connection.raw.transaction(isolation="read_committed"):
                saved = {row[0] for row in await connection.raw.fetch(SAVE, *arguments)}
                if follow_up is not None:
                    await connection.wrapped.run_sync(_run_in_block(follow_up, saved))
            return saved

    async def close(self) -> None:
        """See `IngestStore`."""
        while (connection := await self._find_idle()) is not None:
            await connection.wrapped.close()
        if self._engine is not None:
            await self._engine.dispose()

    @asynccontextmanager
    async def _borrow_connection(self) -> AsyncIterator[_Connection]:
        """A connection for one use; closed after any error, whatever its state."""
        connection = None
        await self._free.acquire()
        try:
            connection = await self._find_idle() or await self._connect()
            yield connection
            self._idle.append(connection)
        except BaseException as error:
            if connection is not None:
                await _discard_connection(connection)
            failure = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            if isinstance(failure, _FAILURES):
                raise _translate_error(failure) from error
            raise
        finally:
            self._free.release()

    async def _find_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.raw.is_closed():
                return connection
            await _discard_connection(connection)
        return None

    async def _connect(self) -> _Connection:
        if self._engine is None:  # only now: the database may be away when the service starts
            self._engine = await asyncio.to_thread(self._database.async_engine)
        wrapped = await self._engine.connect()
        raw = (await wrapped.get_raw_connection()).driver_connection
        assert raw is not None
        return _Connection(wrapped, raw)


async def _discard_connection(connection: _Connection) -> None:
    connection.raw.terminate()
    await connection.wrapped.invalidate()
    await connection.wrapped.close()


def save_arguments(changes: Sequence[RunChange], now: datetime) -> tuple[Any, ...]:
    """The arguments of `SAVE`."""
    changes = sorted(changes, key=_NUMBER)
    points = [
        (
            change.run.id,
            point.metric,
            point.step,
            point.value if point.value == point.value else None,
            point.stderr,
            # As text: asyncpg takes the earliest and the latest possible datetime for infinities.
            point.time.isoformat() if point.time is not None else None,
        )
        for change in changes
        for point in change.points
    ]
    runs = [
        (
            change.run.id,
            change.before.version,
            change.run.last_step,
            changed_json(change.before.verdict, change.run.verdict),
            changed_json(change.before.best_checkpoint, change.run.best_checkpoint),
            changed_json(change.before.raw_maximum, change.run.raw_maximum),
        )
        for change in changes
    ]
    return now, *_to_columns(runs), *_to_columns(points)


def _to_columns(rows: Sequence[tuple[Any, ...]]) -> list[Sequence[Any]]:
    """The six columns of these rows. One that holds only NULLs is empty: `unnest` pads it with them."""
    columns = zip(*rows, strict=True)
    return [() if column[0] is None and column.count(None) == len(column) else column for column in columns] or [()] * 6


_NUMBER = attrgetter("run.id.int")


def _run_in_block(query: Callable[..., T], *arguments: object) -> Callable[[Transaction], T]:
    """The query in a transaction block, so that SQLAlchemy is not left in a transaction."""

    def run(tx: Transaction) -> T:
        with tx.begin():
            return query(tx, *arguments)

    return run


def _translate_error(error: Exception) -> sa.exc.DBAPIError:
    """An asyncpg error as the SQLAlchemy exception that any other statement would raise."""
    sqlstate = getattr(error, "sqlstate", None)
    kind = sa.exc.IntegrityError if sqlstate and sqlstate.startswith("23") else sa.exc.DBAPIError
    return kind("the statement that saves observations", None, error, connection_invalidated=sqlstate is None)


def load_states(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, StoredMonitorState]:
    """The stored monitors of these runs."""
    query = sa.select(monitor_states.c.run_id, monitor_states.c.version, monitor_states.c.state)
    rows = tx.execute(query.where(monitor_states.c.run_id.in_(run_ids)))
    return {run_id: StoredMonitorState(version, state) for run_id, version, state in rows}


def save_state(tx: Transaction, run_id: UUID, stored: StoredMonitorState) -> None:
    """Store the monitor of a run, which is locked, replacing the previous one."""
    save_row(tx, monitor_states, {"run_id": run_id, "version": stored.version, "state": stored.state})
