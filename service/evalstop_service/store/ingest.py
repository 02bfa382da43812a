"""What ingestion reads and saves, as one asynchronous interface to both databases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Protocol, TypeVar
from uuid import UUID

import msgspec

from evalstop_service.domain.run_results import Verdict
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import LIVE, observations, runs

T = TypeVar("T")

FollowUp = Callable[[Transaction, Collection[UUID]], None]
"""Writes the consequences for the saved runs, in the transaction that saves them."""


class RunChange(msgspec.Struct, frozen=True):
    """A run as it was loaded, the run to save, and its new observations.

    `IngestStore.save` writes the columns that most requests change, `HOT_COLUMNS`; `runs.save_changes` writes the rest.
    """

    before: Run
    run: Run
    points: Sequence[PostedObservation]


def save_edit(tx: Transaction, change: RunChange, now: datetime) -> None:
    """Save a run that is locked, all columns in which it differs, with its new observations."""
    before, run = change.before, change.run
    columns = [column.name for column in runs.c if getattr(run, column.name) != getattr(before, column.name)]
    tx.execute(runs.update().where(runs.c.id == run.id).values({name: getattr(run, name) for name in columns}))
    rows = [
        {
            "run_id": run.id,
            "metric": point.metric,
            "step": point.step,
            "superseded_by": LIVE,
            "value": point.value,
            "stderr": point.stderr,
            "attempt": run.attempt,
            "observed_at": point.time,
            "received_at": now,
        }
        for point in change.points
    ]
    if rows:
        tx.execute(observations.insert(), rows)


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
