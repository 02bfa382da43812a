"""Ingestion on the embedded database: in one thread, since SQLite has one writer and its calls block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ingest import FollowUp, RunChange, changed_json
from evalstop_service.store.tables import moment_text

T = TypeVar("T")

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
