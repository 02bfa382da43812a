"""The database: one engine, transactions that write, and transactions that read."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import asyncpg
import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

_REST_SECONDS = 1.0

_CONNECT_SECONDS = 10
_SILENCE = {
    "keepalives_idle": "10",  # seconds
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",  # milliseconds
}
"""How long an other end that is gone without a word is waited for, in libpq's terms; TCP alone waits for minutes."""

# Compiling a plan over all partitions takes 100 ms and more, which no statement here ever earns back. The server asks
# the same of us as we of it: whoever is gone without a word leaves locks that others wait for.
_SET_UP = "; ".join(
    ["SET jit TO off", "SET timezone TO 'UTC'"]
    + [f"SET tcp_{name.removeprefix('tcp_')} TO {value}" for name, value in _SILENCE.items()]
)

_COMMAND_SECONDS = 30.0
"""How long a statement on an event loop may take: by this a lost server is noticed there."""

_LIBPQ_ONLY = (
    "connect_timeout",
    "keepalives",
    *_SILENCE,
    "channel_binding",
    "client_encoding",
    "fallback_application_name",
)
"""Parameters of an URL that asyncpg would take for settings of the server."""

Transaction = sa.Connection
"""What every query takes as its first argument."""


class Database:
    """PostgreSQL or the embedded SQLite, behind the same two verbs.

    `url`: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`, with libpq's parameters behind a `?`.
    `synchronous`: SQLite's pragma of that name; FULL keeps every acknowledged row through a loss of power.
    `connections`: the most that its own engine holds at one time; `async_engine` makes others.
    """

    def __init__(self, url: str, synchronous: str = "FULL", connections: int = 20) -> None:
        self.url = sa.make_url(url)
        if self.url.drivername in ("postgresql", "postgres"):
            self.url = self.url.set(drivername="postgresql+psycopg")
        self.embedded = self.url.get_backend_name() == "sqlite"
        if not self.embedded:
            self.url = self.url.set(query={"connect_timeout": str(_CONNECT_SECONDS)} | _SILENCE | self.url.query)
        self.engine = sa.create_engine(
            self.url,
            pool_size=connections,
            max_overflow=0,
            json_deserializer=_json_value,
            hide_parameters=True,  # a statement that fails is logged, and its parameters may be secrets
        )
        # SQLite has one writer at a time and lets the others poll for the lock; waiting in line is fairer and faster.
        self._writer = threading.Lock() if self.embedded else nullcontext()
        if self.embedded:
            _prepare_sqlite(self.engine, synchronous)
        else:
            _prepare_all(self.engine)
            _ask_after_a_rest(self.engine)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A transaction that may write: committed at the end of the block, rolled back when the block raises."""
        with (
            self._writer,
            self.engine.connect().execution_options(evalstop_writes=True) as tx,
            tx.begin(),
            _translated(tx),
        ):
            yield tx

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """A transaction that only reads."""
        with self.engine.connect() as tx, tx.begin(), _translated(tx):
            yield tx

    def async_engine(self) -> AsyncEngine:
        """An engine for an event loop, on asyncpg and in autocommit; it opens and closes connections as it is told."""

        async def connect() -> asyncpg.Connection[asyncpg.Record]:
            url = self.url.set(drivername="postgresql")
            url = url.difference_update_query(_LIBPQ_ONLY)
            connection = await asyncpg.connect(
                url.render_as_string(hide_password=False), timeout=_CONNECT_SECONDS, command_timeout=_COMMAND_SECONDS
            )
            await connection.execute(_SET_UP)
            return connection

        return create_async_engine(
            "postgresql+asyncpg://",
            async_creator=connect,
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            json_deserializer=_json_value,
            hide_parameters=True,
        )

    def close(self) -> None:
        """Close all pooled connections."""
        self.engine.dispose()


def _json_value(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # the embedded database may hold NaN, which is no JSON
        return json.loads(text)


def _prepare_all(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        connection.execute(_SET_UP)
        connection.commit()


def _ask_after_a_rest(engine: sa.Engine) -> None:
    """Have the server asked whether a connection still stands when it lay idle for a while, not before each use."""

    @sa.event.listens_for(engine, "checkin")
    def rest(_connection: Any, record: Any) -> None:
        record.info["rested_since"] = time.monotonic()

    @sa.event.listens_for(engine, "checkout")
    def ask(connection: Any, record: Any, _proxy: Any) -> None:
        if connection is None or time.monotonic() - record.info.get("rested_since", math.inf) < _REST_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise sa.exc.DisconnectionError from error  # the pool opens another


def _prepare_sqlite(engine: sa.Engine, synchronous: str) -> None:
    if synchronous.upper() not in ("FULL", "NORMAL", "EXTRA"):
        raise ValueError(f"synchronous is {synchronous!r}; SQLite is kept durable with FULL, NORMAL or EXTRA")

    @sa.event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins no transaction of its own; see `begin` below
        for pragma in (
            "journal_mode=WAL",
            "foreign_keys=ON",
            "busy_timeout=30000",
            f"synchronous={synchronous}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A deferred transaction that reads first and writes later fails at once if another wrote in between.
        writes = connection.get_execution_options().get("evalstop_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def driver_connection(tx: Transaction) -> Any:
    """The driver's own connection under a transaction, psycopg's or sqlite3's, for the few statements that are hot.

    Its errors leave the transaction as SQLAlchemy's, like those of all other statements.
    """
    return tx.connection.driver_connection


@contextmanager
def _translated(tx: Transaction) -> Iterator[None]:
    connection, errors = driver_connection(tx), tx.dialect.loaded_dbapi.Error
    try:
        yield
    except errors as error:
        lost = tx.dialect.is_disconnect(error, connection, None)
        if lost:
            tx.invalidate(error)
        raise sa.exc.DBAPIError.instance(
            "a statement of the driver's own", None, error, errors, connection_invalidated=lost, dialect=tx.dialect
        ) from error


def is_transient(error: sa.exc.DBAPIError) -> bool:
    """Whether the same transaction may well succeed when it is tried again: nothing is wrong with it.

    It was chosen as a deadlock's victim, could not be serialized, met a locked file, or its connection was lost. After
    the last it may have been committed all the same.
    """
    if error.connection_invalidated:
        return True
    if (state := getattr(error.orig, "sqlstate", None)) is not None:
        return state in ("40001", "40P01") or state.startswith(("08", "57P"))
    if (name := getattr(error.orig, "sqlite_errorname", None)) is not None:
        return str(name).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
    return isinstance(error, sa.exc.OperationalError)  # PostgreSQL cannot be reached


def is_disk_full(error: sa.exc.DBAPIError) -> bool:
    """Whether there is no room left where the database keeps its files."""
    return getattr(error.orig, "sqlstate", None) == "53100" or getattr(error.orig, "sqlite_errorname", None) in (
        "SQLITE_FULL",
        "SQLITE_IOERR_SHMSIZE",
    )


def insert_if_new(tx: Transaction, table: sa.Table, values: dict[str, Any], unique: list[str]) -> bool:
    """Insert a row unless there is one with the same `unique` columns; False if there was."""
    insert = postgresql.insert if tx.dialect.name == "postgresql" else sqlite.insert
    statement = insert(table).values(**values).on_conflict_do_nothing(index_elements=unique)
    # The number of rows would do, but not every driver tells it of an INSERT.
    return tx.execute(statement.returning(sa.literal_column("1"))).first() is not None


def contains_text(column: sa.ColumnElement[str], part: str) -> sa.ColumnElement[bool]:
    """The condition that a text contains `part`, whatever its case, with no character in it special."""
    return column.icontains(part, autoescape=True)
