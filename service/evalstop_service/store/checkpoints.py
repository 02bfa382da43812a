"""Checkpoints that trainers reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.fields import doc
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import LIVE, checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """The step of a saved model and where it was saved."""

    step: Annotated[int, doc("the training step that it holds")]
    uri: Annotated[str, doc("the URI that the trainer reported")]
    attempt: Annotated[int, doc("the attempt that saved it")]
    created_at: Annotated[datetime, doc("when it was registered")]


def add_checkpoint(tx: Transaction, run_id: UUID, checkpoint: Checkpoint) -> None:
    """Store a checkpoint for a step that has no live one."""
    tx.execute(checkpoints.insert().values(run_id=run_id, superseded_by=LIVE, **vars(checkpoint)))


def list_checkpoints(tx: Transaction, run_id: UUID) -> list[Checkpoint]:
    """A run's live checkpoints by ascending step."""
    return load_checkpoints(tx, [run_id]).get(run_id, [])


def load_checkpoints(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, list[Checkpoint]]:
    """The live checkpoints of each of these runs that has any, by ascending step."""
    table = checkpoints.c
    query = sa.select(table.run_id, table.step, table.uri, table.attempt, table.created_at)
    query = query.where(table.run_id.in_(run_ids), table.superseded_by == LIVE).order_by(table.run_id, table.step)
    by_run: dict[UUID, list[Checkpoint]] = defaultdict(list)
    for run_id, *columns in tx.execute(query):
        by_run[run_id].append(Checkpoint(*columns))
    return by_run


def supersede_checkpoints(tx: Transaction, run_id: UUID, after_step: int, by_attempt: int) -> None:
    """Mark the live checkpoints after a step as superseded."""
    query = checkpoints.update().where(
        checkpoints.c.run_id == run_id, checkpoints.c.step > after_step, checkpoints.c.superseded_by == LIVE
    )
    tx.execute(query.values(superseded_by=by_attempt))
