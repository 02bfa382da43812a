"""What MLflow clients store beyond a run's labels: experiment, params, times, inputs; and logged models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.store.database import Transaction, find_one, insert_if_new
from evalstop_service.store.runs import Run, load_runs
from evalstop_service.store.tables import logged_models, mlflow_runs, runs


class MlflowRun(msgspec.Struct, frozen=True):
    """A row of mlflow_runs, or the defaults for a run that has none.

    `experiment_id`: None is the default experiment. `start_time`, `end_time`: milliseconds since 1970, as the client
    sent them. `inputs`, `outputs`: JSON objects as clients send them.
    """

    run_id: UUID
    experiment_id: UUID | None = None
    start_time: int | None = None
    end_time: int | None = None
    deleted: bool = False
    params: dict[str, str] = {}
    inputs: dict[str, list[Any]] = {}
    outputs: dict[str, list[Any]] = {}


class LoggedModel(msgspec.Struct, frozen=True):
    """A model that an MLflow client logged.

    `run_id`: the run that trained it; for a model without one, the model's own id. `document`: the response body.
    """

    run_id: UUID
    id: UUID
    project_id: UUID
    experiment_id: UUID | None
    document: dict[str, Any]


def add_mlflow_run(tx: Transaction, run: MlflowRun) -> None:
    """Store what a client sent when it created the run."""
    tx.execute(mlflow_runs.insert().values(msgspec.structs.asdict(run)))


def change_mlflow_run(tx: Transaction, run_id: UUID, change: Callable[[MlflowRun], MlflowRun]) -> None:
    """Change the MLflow fields of a run that is locked in this transaction."""
    before = load_mlflow_runs(tx, [run_id])[run_id]
    after = change(before)
    if after != before:
        values = msgspec.structs.asdict(after)
        if not insert_if_new(tx, mlflow_runs, values, ["run_id"]):
            tx.execute(mlflow_runs.update().where(mlflow_runs.c.run_id == run_id).values(values))


def load_mlflow_runs(tx: Transaction, run_ids: Collection[UUID]) -> dict[UUID, MlflowRun]:
    """The MLflow fields of each of these runs that has any."""
    runs_by_id = {run_id: MlflowRun(run_id) for run_id in run_ids}
    for row in tx.execute(sa.select(mlflow_runs).where(mlflow_runs.c.run_id.in_(run_ids))).mappings():
        runs_by_id[row["run_id"]] = MlflowRun(**row)
    return runs_by_id


def list_runs_of_experiments(
    tx: Transaction, project_id: UUID, experiment_ids: Sequence[UUID | None], limit: int
) -> list[Run]:
    """The newest runs of these experiments of a project that can be read."""
    query = sa.select(runs.c.id).outerjoin(mlflow_runs, mlflow_runs.c.run_id == runs.c.id)
    query = (
        query.where(runs.c.project_id == project_id, _is_of(mlflow_runs, experiment_ids))
        .order_by(runs.c.id.desc())
        .limit(limit)
    )
    chosen = list(tx.execute(query).scalars())
    loaded = load_runs(tx, chosen, skip_unreadable=True)
    return [loaded[run_id] for run_id in chosen if run_id in loaded]


def add_logged_model(tx: Transaction, model: LoggedModel) -> None:
    """Store a new model."""
    tx.execute(logged_models.insert().values(msgspec.structs.asdict(model)))


def save_logged_model(tx: Transaction, model: LoggedModel) -> None:
    """Store the changes of a model that is locked in this transaction."""
    tx.execute(logged_models.update().where(logged_models.c.id == model.id).values(document=model.document))


def find_logged_model(tx: Transaction, project_id: UUID, model_id: UUID, *, lock: bool = False) -> LoggedModel | None:
    """The project's model with this id; with `lock`, locked until the transaction ends."""
    query = sa.select(logged_models).where(logged_models.c.project_id == project_id, logged_models.c.id == model_id)
    return find_one(tx, LoggedModel, query.with_for_update() if lock else query)


def list_logged_models(
    tx: Transaction, project_id: UUID, experiment_ids: Sequence[UUID | None], limit: int
) -> list[LoggedModel]:
    """The newest models of these experiments of a project."""
    query = sa.select(logged_models).where(
        logged_models.c.project_id == project_id, _is_of(logged_models, experiment_ids)
    )
    return [LoggedModel(**row) for row in tx.execute(query.order_by(logged_models.c.id.desc()).limit(limit)).mappings()]


def _is_of(table: sa.Table, experiment_ids: Sequence[UUID | None]) -> sa.ColumnElement[bool]:
    """The condition that a row belongs to one of these experiments; None is the default experiment."""
    of_stored = table.c.experiment_id.in_([stored_id for stored_id in experiment_ids if stored_id is not None])
    return sa.or_(of_stored, table.c.experiment_id.is_(None)) if None in experiment_ids else of_stored
