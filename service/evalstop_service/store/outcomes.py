"""Outcomes: what turned out to be true of an attempt, who or what reported it, and when. Rows are only added."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import outcomes
from evalstop_service.store.tables.decisions import Outcome as Outcome


def add_outcome(tx: Transaction, run_id: UUID, attempt: int, outcome: Outcome) -> None:
    """Append an outcome; the run is locked in this transaction."""
    last = sa.select(sa.func.coalesce(sa.func.max(outcomes.c.sequence), 0))
    last = last.where(outcomes.c.run_id == run_id, outcomes.c.attempt == attempt)
    key = {"run_id": run_id, "attempt": attempt, "sequence": last.scalar_subquery() + 1}
    tx.execute(outcomes.insert().values(vars(outcome) | key))


def list_outcomes(tx: Transaction, run_id: UUID, attempt: int) -> list[Outcome]:
    """All outcomes of an attempt, oldest first; the last one counts."""
    return load_history(tx, [(run_id, attempt)]).get((run_id, attempt), [])


def find_outcome(tx: Transaction, run_id: UUID, attempt: int) -> Outcome | None:
    """The outcome of an attempt that counts."""
    return load_outcomes(tx, [(run_id, attempt)]).get((run_id, attempt))


def load_outcomes(tx: Transaction, attempts: Sequence[tuple[UUID, int]]) -> dict[tuple[UUID, int], Outcome]:
    """The outcome that counts for each of these attempts that has one."""
    return {attempt: history[-1] for attempt, history in load_history(tx, attempts).items()}


def load_history(tx: Transaction, attempts: Sequence[tuple[UUID, int]]) -> dict[tuple[UUID, int], list[Outcome]]:
    """All outcomes of each of these attempts, oldest first."""
    if not attempts:
        return {}
    by_attempt: dict[tuple[UUID, int], list[Outcome]] = defaultdict(list)
    query = sa.select(outcomes).where(sa.tuple_(outcomes.c.run_id, outcomes.c.attempt).in_(attempts))
    for row in tx.execute(query.order_by(outcomes.c.sequence)):
        names = dict(row._mapping)
        by_attempt[names.pop("run_id"), names.pop("attempt")].append(Outcome(**names))
    return by_attempt
