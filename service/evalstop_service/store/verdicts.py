"""Verdicts: one row for each change of a run's verdict."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.fields import doc
from evalstop_service.domain.run_results import Call, Verdict
from evalstop_service.store.database import Transaction, find_page
from evalstop_service.store.tables import verdicts


@dataclass(frozen=True)
class VerdictChange:
    """A verdict, and when it was reached."""

    sequence: Annotated[int, doc("number of the change in this run")]
    attempt: Annotated[int, doc("the attempt of the run")]
    verdict: Annotated[Verdict, doc("with its evidence")]
    at: Annotated[datetime, doc("when it was reached")]


def add_verdict(tx: Transaction, run_id: UUID, attempt: int, verdict: Verdict, now: datetime) -> None:
    """Append a change; the run is locked in this transaction."""
    last = sa.select(sa.func.coalesce(sa.func.max(verdicts.c.sequence), 0)).where(verdicts.c.run_id == run_id)
    sequence = last.scalar_subquery() + 1
    tx.execute(verdicts.insert().values(run_id=run_id, sequence=sequence, attempt=attempt, verdict=verdict, at=now))


def has_reached(tx: Transaction, run_id: UUID, attempt: int, call: Call) -> bool:
    """Whether any verdict on this attempt made this call."""
    query = sa.exists().where(
        verdicts.c.run_id == run_id, verdicts.c.attempt == attempt, verdicts.c.verdict["verdict"].as_string() == call
    )
    return tx.execute(sa.select(query)).scalar_one()


def list_verdicts(tx: Transaction, run_id: UUID, before: int | None = None, limit: int = 100) -> list[VerdictChange]:
    """A run's verdict changes, newest first, before the sequence number `before`."""
    query = sa.select(verdicts.c.sequence, verdicts.c.attempt, verdicts.c.verdict, verdicts.c.at)
    return find_page(tx, VerdictChange, query.where(verdicts.c.run_id == run_id), verdicts.c.sequence, before, limit)
