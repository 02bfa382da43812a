"""Wakes the workers once a transaction that left them something to do is committed.

On PostgreSQL by NOTIFY, which fires on commit and reaches every worker that listens. The embedded database cannot
notify other processes; a worker in the same process is called when the connection returns to its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from evalstop_service.store.database import Database, Transaction

CHANNEL = "evalstop_deliveries"

_MARK = "evalstop_wakes_workers"


def wake_workers(tx: Transaction) -> None:
    """Wake the workers when this transaction is committed."""
    if tx.dialect.name == "postgresql":
        tx.execute(sa.select(sa.func.pg_notify(CHANNEL, "")))
    else:
        tx.info[_MARK] = True


@contextmanager
def calling_on_commit(database: Database, callback: Callable[[], None]) -> Iterator[None]:
    """Within the block, call `callback`, from any thread, after each transaction here that wakes the workers.

    It is called after a rollback too, which is harmless. It is not called for transactions of PostgreSQL.
    """

    def returned(_connection: object, record: sa.pool.ConnectionPoolEntry) -> None:
        if record.info.pop(_MARK, False):
            callback()

    sa.event.listen(database.engine, "checkin", returned)
    try:
        yield
    finally:
        sa.event.remove(database.engine, "checkin", returned)
