"""Descriptions that people give runs; a run without one has no row."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.run_descriptions import NOTHING_SAID, RunDescription
from evalstop_service.store.database import Transaction, insert_if_new
from evalstop_service.store.tables import run_descriptions


def load_descriptions(tx: Transaction, run_ids: Collection[UUID]) -> dict[UUID, RunDescription]:
    """The descriptions of these runs."""
    descriptions = dict.fromkeys(run_ids, NOTHING_SAID)
    table = run_descriptions.c
    query = sa.select(table.run_id, table.owner, table.group, table.tags, table.notes)
    for run_id, *columns in tx.execute(query.where(table.run_id.in_(run_ids))):
        descriptions[run_id] = RunDescription(*columns)
    return descriptions


def save_description(
    tx: Transaction, project_id: UUID, run_id: UUID, description: RunDescription, now: datetime
) -> None:
    """Store the description of a run."""
    values = msgspec.structs.asdict(description) | {"changed_at": now}
    if not insert_if_new(tx, run_descriptions, values | {"run_id": run_id, "project_id": project_id}, ["run_id"]):
        tx.execute(run_descriptions.update().where(run_descriptions.c.run_id == run_id).values(values))
