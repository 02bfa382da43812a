"""Wakes the workers when a transaction that left work for them commits.

PostgreSQL: by NOTIFY, which fires on commit and reaches every listening worker. The embedded database cannot notify
other processes; a worker in the same process is called when the connection returns to its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

    It is also called after a rollback, which is harmless, and never for transactions on PostgreSQL.
    """

    def check(info: dict[Any, Any]) -> None:
        if info.pop(_MARK, False):
            callback()

    with database.calling_on_return(check):
        yield
