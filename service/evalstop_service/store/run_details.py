"""What is stored beside the row of a run: descriptions by people, checkpoints, and each change of its verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.fields import doc
from evalstop_service.domain.run import NOTHING_SAID, Call, RunDescription, Verdict
from evalstop_service.store.database import Transaction, find_page, insert_if_new, read_columns
from evalstop_service.store.run_health import RunHealth
from evalstop_service.store.runs import POLICY_COLUMNS, Run
from evalstop_service.store.tables import (
    LIVE,
    attempts,
    checkpoints,
    mlflow_runs,
    policies,
    run_descriptions,
    run_health,
    runs,
    verdicts,
)


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
