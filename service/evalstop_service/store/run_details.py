"""What is stored beside the row of a run, and the descriptions that people give runs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.run_descriptions import NOTHING_SAID, RunDescription
from evalstop_service.store.database import Transaction, insert_if_new, read_columns
from evalstop_service.store.run_health import RunHealth
from evalstop_service.store.runs import POLICY_COLUMNS, Run
from evalstop_service.store.tables import attempts, mlflow_runs, policies, run_descriptions, run_health, runs


class RunDetails(NamedTuple):
    """A run, and what is stored beside its row.

    `resumed_from`: the step from which its current attempt was resumed; None for the first. `health`: None before the
    first check. `params`: those that MLflow clients logged.
    """

    run: Run
    resumed_from: int | None
    health: RunHealth | None
    description: RunDescription
    params: dict[str, str]


def find_run_details(tx: Transaction, project_id: UUID, run_id: UUID) -> RunDetails | None:
    """The project's run with this id, and what is stored beside it."""
    row = tx.execute(_FIND, {"of_project": project_id, "of_id": run_id}).mappings().one_or_none()
    if row is None:
        return None
    health, description = read_columns(row, run_health.c), read_columns(row, _DESCRIPTION)
    return RunDetails(
        Run(**read_columns(row, _RUN)),
        row["resumed_from_step"],
        RunHealth(**health) if health["run_id"] else None,
        RunDescription(**description) if row["tags"] is not None else NOTHING_SAID,
        row["params"] or {},
    )


_RUN = (*runs.c, *POLICY_COLUMNS)
_DESCRIPTION = tuple(run_descriptions.c[name] for name in RunDescription.__struct_fields__)
_FIND = (
    sa.select(*_RUN, *run_health.c, *_DESCRIPTION, attempts.c.resumed_from_step, mlflow_runs.c.params)
    .select_from(runs)
    .join(policies, policies.c.id == runs.c.policy_id)
    .join(attempts, (attempts.c.run_id == runs.c.id) & (attempts.c.attempt == runs.c.attempt))
    .outerjoin(run_health, run_health.c.run_id == runs.c.id)
    .outerjoin(run_descriptions, run_descriptions.c.run_id == runs.c.id)
    .outerjoin(mlflow_runs, mlflow_runs.c.run_id == runs.c.id)
    .where(runs.c.project_id == sa.bindparam("of_project"), runs.c.id == sa.bindparam("of_id"))
)


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
