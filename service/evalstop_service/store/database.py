"""The database: one engine, with read-write and read-only transactions."""

from __future__ import annotations

import json
import operator
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import asyncpg
import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from evalstop_service.store.faults import READ_ONLY

T = TypeVar("T")

_ANY: Mapping[Any, Any] = {}

_WAIT_SECONDS = 30.0
"""How long a transaction waits for a free connection."""

_CONNECT_SECONDS = 10
_TCP_TIMEOUTS = {
    "keepalives_idle": "10",  # seconds
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",  # milliseconds
}
"""When an unresponsive peer is given up, in libpq's terms; TCP alone takes minutes."""

_SET_UP_POOLED = "SET timezone TO 'UTC'; SET datestyle TO 'ISO'"
"""What a pooler sets again in each session that it uses for this client."""

# JIT compilation of a plan over all partitions takes 100 ms and more, which no statement here ever earns back. A role
# or database may default to another isolation level, where concurrent inserts fail instead of waiting. The server
# gets the same TCP limits as the client: the locks of a client that vanished block others until it is noticed.
_SET_UP = "; ".join(
    [_SET_UP_POOLED, "SET jit TO off", "SET default_transaction_isolation TO 'read committed'"]
    + [f"SET tcp_{name.removeprefix('tcp_')} TO {value}" for name, value in _TCP_TIMEOUTS.items()]
)

_COMMAND_SECONDS = 30.0
"""Timeout of a statement on an event loop, so that a lost server is noticed there."""

_BOTH_DRIVERS = {
    *("host", "port", "user", "password", "passfile", "dbname", "service", "options", "application_name", "krbsrvname"),
    *("gsslib", "sslmode", "sslnegotiation", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword"),
    *("ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs"),
}
"""URL parameters that asyncpg understands as libpq does. It would pass others of libpq to the server as settings."""

HAS_CITUS = "has_citus"
"""In the `info` of a connection: whether tables of its database may be distributed by Citus."""

IS_POOLED = "is_pooled"
"""The same: whether a pooler such as pgbouncer may run each transaction in another session of the server."""

_ASK = "SELECT pg_backend_pid(), EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"

Transaction = sa.Connection
"""The first argument of every query."""


class Database:
    """PostgreSQL or the embedded SQLite, behind the same two methods.

    `url`: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`, with libpq's parameters after a `?`.
    `connections`: the most that are opened; on PostgreSQL a quarter for `async_engine`, the rest for this pool. A fifth
    of the pool is reserved for decisions, which also go first where transactions queue: see `store.turns`.
    """

    def __init__(self, url: str, connections: int = 20) -> None:
        self.url = sa.make_url(url)
        if self.url.drivername in ("postgresql", "postgres"):
            self.url = self.url.set(drivername="postgresql+psycopg")
        self.embedded = self.url.get_backend_name() == "sqlite"
        if not self.embedded:
            ours = {"connect_timeout": str(_CONNECT_SECONDS), "client_encoding": "utf8"} | _TCP_TIMEOUTS
            self.url = self.url.set(query=ours | self.url.query)
        self.posting_connections = 0 if self.embedded else max(1, connections // 4)
        connections -= self.posting_connections
        self.engine = sa.create_engine(
            self.url,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=_WAIT_SECONDS,
            pool_pre_ping=not self.embedded,
            json_deserializer=msgspec.json.decode,
            hide_parameters=True,  # a failed statement is logged, and its parameters may be secrets
            **({} if self.embedded else {"isolation_level": "READ COMMITTED"}),  # at each begin, also through a pooler
        )
        self.ordinary_connections = max(1, connections - max(1, connections // 5))
        self._ordinary = threading.Semaphore(self.ordinary_connections)
        # SQLite allows one writer, and others poll for the lock; queueing here is fairer and faster.
        self.turns = Turns() if self.embedded else None
        if self.embedded:
            _prepare_sqlite(self.engine)
        else:
            _prepare_postgresql(self.engine)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A read-write transaction: committed at the end of the block, rolled back when the block raises."""
        with self.turns.take() if self.turns else nullcontext(), self._connect(writes=True) as tx, tx.begin():
            yield tx

    @contextmanager
    def reading(self, *, snapshot: bool = False) -> Iterator[Transaction]:
        """Statements that only read; with `snapshot`, all of them see the same state of the database.

        Without, each statement on PostgreSQL sees what is committed when it begins, as in a transaction of its default
        isolation level. The statements then need none, which saves two round trips.
        """
        level = "REPEATABLE READ" if snapshot else "AUTOCOMMIT"
        with self._connect() as connection:
            tx = connection if self.embedded else connection.execution_options(isolation_level=level)
            with tx.begin():
                yield tx

    @contextmanager
    def _connect(self, *, writes: bool = False) -> Iterator[sa.Connection]:
        """A connection of the pool. The last ones are for decisions, and for SQLite's one writer, which these await."""
        is_ordinary = not (WORK.get().is_decision or (writes and self.embedded))
        if is_ordinary and not self._ordinary.acquire(timeout=_WAIT_SECONDS):
            raise sa.exc.TimeoutError(f"no connection became free in {_WAIT_SECONDS:g} seconds")
        try:
            with self.engine.connect().execution_options(evalstop_writes=writes) as connection:
                yield connection
        finally:
            if is_ordinary:
                self._ordinary.release()

    @cached_property
    def learned(self) -> Mapping[Any, bool]:
        """What a connection has found out about PostgreSQL: IS_POOLED and HAS_CITUS."""
        with self.engine.connect() as connection:
            return {name: connection.info[name] for name in (IS_POOLED, HAS_CITUS)}

    def async_engine(self) -> AsyncEngine:
        """An engine for an event loop, on asyncpg, in autocommit and without a pool: the caller manages connections."""
        is_pooled = self.learned[IS_POOLED]

        async def connect() -> asyncpg.Connection[asyncpg.Record]:
            url = self.url.set(drivername="postgresql")
            query = {name: value for name, value in url.query.items() if name in _BOTH_DRIVERS}
            if address := url.query.get("hostaddr"):
                url, query = url.set(host=None), query | {"host": address}
            url = url.set(query=query)
            connection = await asyncpg.connect(
                url.render_as_string(hide_password=False),
                timeout=_CONNECT_SECONDS,
                command_timeout=_COMMAND_SECONDS,
                statement_cache_size=0 if is_pooled else 100,
            )
            await connection.execute(_SET_UP_POOLED if is_pooled else _SET_UP)
            return connection

        unnamed = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=connect,
            connect_args=unnamed if is_pooled else {},
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            json_deserializer=msgspec.json.decode,
            hide_parameters=True,
        )
        sa.event.listen(engine.sync_engine, "connect", lambda _, record: record.info.update(self.learned))
        return engine

    def close(self) -> None:
        """Close all pooled connections."""
        self.engine.dispose()


def _prepare_postgresql(engine: sa.Engine) -> None:
    """Set up each connection."""

    @sa.event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        process_id, record.info[HAS_CITUS] = connection.execute(_ASK).fetchone()
        # A pooler gives its clients process ids of its own.
        record.info[IS_POOLED] = is_pooled = connection.info.backend_pid != process_id
        if is_pooled:
            connection.prepare_threshold = None  # what one session has prepared is missing in the next
        connection.execute(_SET_UP_POOLED if is_pooled else _SET_UP)
        connection.commit()

    @sa.event.listens_for(engine, "handle_error")
    def drop_read_only(context: sa.engine.ExceptionContext) -> None:
        # After a failover the old server is a standby: new connections reach the new one.
        if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
            context.is_disconnect = True


def _switch_to_wal(connection: Any) -> None:
    """Of two processes that create a file at the same time, SQLite refuses one at once: neither would get its lock."""
    for tries_left in reversed(range(100)):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if not tries_left:
                raise
        time.sleep(0.05)


def _prepare_sqlite(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver starts no transactions itself; see `begin` below
        # With FULL every acknowledged row survives a power failure.
        for pragma in ("busy_timeout=30000", "foreign_keys=ON", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
        _switch_to_wal(connection)

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A deferred transaction that reads and then writes fails at once if another wrote in between.
        writes = connection.get_execution_options().get("evalstop_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def read_now(tx: Transaction, here: Callable[[], datetime]) -> datetime:
    """The time that windows, deadlines and leases are compared with: PostgreSQL's, one for all processes.

    `here`: this machine's clock, which the embedded database uses. Read it once in a transaction.
    """
    if tx.dialect.name != "postgresql":
        return here()
    now: datetime = tx.execute(_NOW).scalar_one()  # of the statement, since its transaction may have waited
    return now


_NOW = sa.select(sa.func.clock_timestamp(type_=sa.DateTime(timezone=True)))


def insert_if_new(
    tx: Transaction, table: sa.Table, values: dict[str, Any], unique: Sequence[str] | None = None
) -> bool:
    """Insert a row unless one with the same `unique` columns (None: of any unique index) exists; returns whether it was
    inserted."""
    # As parameters: `values(...)` would build an expression for each column, at every call.
    statement = _insert(tx, table).on_conflict_do_nothing(index_elements=unique)
    # Not `rowcount`: not every driver reports it for an INSERT.
    return tx.execute(statement.returning(sa.literal_column("1")), values).first() is not None


def append_row(tx: Transaction, table: sa.Table, key: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Insert a row with the next `sequence` of its key, whose writers exclude each other by a lock."""
    of_key = (table.c[name] == value for name, value in key.items())
    last = sa.select(sa.func.coalesce(sa.func.max(table.c.sequence), 0)).where(*of_key)
    tx.execute(table.insert().values({**values, **key, "sequence": last.scalar_subquery() + 1}))


def save_row(tx: Transaction, table: sa.Table, values: dict[str, Any]) -> None:
    """Insert a row, or change the one with its primary key to these values."""
    insert, key = _insert(tx, table), [column.name for column in table.primary_key]
    changed = {name: insert.excluded[name] for name in values if name not in key}
    tx.execute(insert.on_conflict_do_update(index_elements=key, set_=changed), values)


def _insert(tx: Transaction, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    return postgresql.insert(table) if tx.dialect.name == "postgresql" else sqlite.insert(table)


def find_one(
    tx: Transaction, kind: Callable[..., T], statement: sa.Executable, parameters: dict[str, Any] | None = None
) -> T | None:
    """The one row that a statement returns, as an object of this kind; None if there is no row."""
    row = tx.execute(statement, parameters).mappings().one_or_none()
    return kind(**row) if row else None


def find_all(
    tx: Transaction, kind: Callable[..., T], statement: sa.Executable, parameters: dict[str, Any] | None = None
) -> list[T]:
    """The rows that a statement returns, as objects of this kind."""
    return [kind(**row) for row in tx.execute(statement, parameters).mappings()]


def find_page(
    tx: Transaction, kind: Callable[..., T], query: sa.Select[Any], key: sa.ColumnElement[Any], before: Any, limit: int
) -> list[T]:
    """Up to `limit` rows of a query, the highest key first; `before`: only those with a lower key."""
    query = query.where(*match_given(before={key: before}))
    return find_all(tx, kind, query.order_by(key.desc()).limit(limit))


def match_given(
    exact: Mapping[Any, Any] = _ANY, *, since: Mapping[Any, Any] = _ANY, before: Mapping[Any, Any] = _ANY
) -> list[sa.ColumnElement[bool]]:
    """The conditions that columns have exactly these values, these or higher ones, and lower ones; None: any value."""
    bounds = ((operator.eq, exact), (operator.ge, since), (operator.lt, before))
    return [meets(column, value) for meets, given in bounds for column, value in given.items() if value is not None]


def read_member(tx: Transaction, column: sa.ColumnElement[Any], key: str) -> sa.ColumnElement[str]:
    """A member of a JSON object of texts; NULL if it has none."""
    if tx.dialect.name == "sqlite":
        # The key is compared with the stored text, where Python's json module has escaped other letters than ASCII.
        return sa.func.json_extract(column, f"$.{json.dumps(key)}", type_=sa.Text)
    return column.op("->>", return_type=sa.Text())(key)


class Work(NamedTuple):
    """What is being worked on: a request of this key (or session) of this project, which may be a decision.

    `key` and `project` are None for the service's own work. A decision is a veto, a pause, a report and the like.
    """

    key: Hashable = None
    project: Hashable = None
    is_decision: bool = False


WORK: ContextVar[Work] = ContextVar("work", default=Work())  # noqa: B039 - a tuple
"""The work of the current task; threads that are started with its context inherit it."""


@contextmanager
def decision_lane() -> Iterator[None]:
    """Within the block, transactions of this task or thread are those of a decision and go before all others."""
    token = WORK.set(Work(is_decision=True))
    try:
        yield
    finally:
        WORK.reset(token)


class Turns:
    """A lock that serves decisions first, and among equals whoever came first. Thread-safe.

    For the one writer of SQLite. A lock of the standard library serves waiters in any order, so that a pause would wait
    for every opening of a run that another key has sent before. No project has more than half of the threads that wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._decisions, self._others = deque[threading.Lock](), deque[threading.Lock]()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn of the current `WORK`, and hold it until the block ends."""
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            if self._is_taken:
                (self._decisions if WORK.get().is_decision else self._others).append(turn)
            else:
                self._is_taken = True
                turn.release()
        # Released by the one that hands over: the turn is then taken already, and nobody can come between.
        turn.acquire()
        try:
            yield
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            waiting = self._decisions or self._others
            if waiting:
                waiting.popleft().release()
            else:
                self._is_taken = False
