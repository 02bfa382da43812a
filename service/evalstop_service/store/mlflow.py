"""What MLflow clients store: experiments (its folders of runs), params and times; and its search of runs, in SQL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store.database import (
    Transaction,
    find_all,
    find_one,
    insert_if_new,
    match_given,
    read_member,
    save_row,
)
from evalstop_service.store.tables import experiments, mlflow_runs, runs
from evalstop_service.store.tables.projects import DEFAULT_NUMBER as DEFAULT_NUMBER
from evalstop_service.store.tables.projects import Experiment as Experiment
from evalstop_service.store.tables.runs import MlflowRun as MlflowRun

MAX_SEARCHED = 5000
"""The number of newest runs that a search covers."""

STATUSES = {
    RunStatus.RUNNING: "RUNNING",
    RunStatus.PARKED: "SCHEDULED",
    RunStatus.COMPLETED: "FINISHED",
    RunStatus.STOPPED: "KILLED",
    RunStatus.FAILED: "FAILED",
    RunStatus.LOST: "FAILED",
}
"""MLflow's term for each status of a run."""

RUN_NAME, USER, NO_USER = "mlflow.runName", "mlflow.user", "unknown"


def add_mlflow_run(tx: Transaction, run: MlflowRun) -> None:
    """Store what a client sent when it created the run."""
    tx.execute(mlflow_runs.insert().values(msgspec.structs.asdict(run)))


def change_mlflow_run(tx: Transaction, run_id: UUID, change: Callable[[MlflowRun], MlflowRun]) -> None:
    """Change the MLflow fields of a run that is locked in this transaction."""
    before = load_mlflow_runs(tx, [run_id])[run_id]
    after = change(before)
    if after != before:
        save_row(tx, mlflow_runs, msgspec.structs.asdict(after))


def load_mlflow_runs(tx: Transaction, run_ids: Collection[UUID]) -> dict[UUID, MlflowRun]:
    """The MLflow fields of each of these runs that has any."""
    runs_by_id = {run_id: MlflowRun(run_id) for run_id in run_ids}
    for row in tx.execute(sa.select(mlflow_runs).where(mlflow_runs.c.run_id.in_(run_ids))).mappings():
        runs_by_id[row["run_id"]] = MlflowRun(**row)
    return runs_by_id


ATTRIBUTES = ("run_id", "run_name", "status", "user_id")
"""The attributes of runs that a filter may compare."""


class Clause(NamedTuple):
    """Compares the text `key` of `kind` (attributes, tags, params) to `value`, with = or !=."""

    kind: str
    key: str
    sign: str
    value: str


def search_runs(
    tx: Transaction,
    project_id: UUID,
    experiment_ids: Sequence[UUID | None],
    clauses: Sequence[Clause],
    offset: int,
    limit: int,
) -> list[UUID]:
    """The ids of the matching runs of these experiments, among the newest, newest first; None is the default
    experiment."""
    of_stored = mlflow_runs.c.experiment_id.in_([stored_id for stored_id in experiment_ids if stored_id is not None])
    of_default = mlflow_runs.c.experiment_id.is_(None) if None in experiment_ids else sa.false()
    source = runs.outerjoin(mlflow_runs, mlflow_runs.c.run_id == runs.c.id)
    newest = sa.select(runs.c.id).select_from(source).where(runs.c.project_id == project_id, of_stored | of_default)
    searched = newest.order_by(runs.c.id.desc()).limit(MAX_SEARCHED).subquery()
    query = sa.select(runs.c.id).select_from(source.join(searched, searched.c.id == runs.c.id))
    attributes: dict[str, sa.ColumnElement[Any]] = {
        "run_id": sa.func.replace(sa.cast(runs.c.id, sa.Text), "-", ""),
        "run_name": sa.func.coalesce(read_member(tx, runs.c.labels, RUN_NAME), runs.c.name),
        "user_id": sa.func.coalesce(read_member(tx, runs.c.labels, USER), NO_USER),
        "status": sa.case(STATUSES, value=sa.type_coerce(runs.c.status, sa.Text)),
    }
    members = {"tags": runs.c.labels, "params": mlflow_runs.c.params}
    for kind, key, sign, value in clauses:  # as in MLflow, a row without the field meets none
        field = attributes[key] if kind == "attributes" else read_member(tx, members[kind], key)
        query = query.where(field == value if sign == "=" else field != value)
    return list(tx.execute(query.order_by(runs.c.id.desc()).offset(offset).limit(limit)).scalars())


DEFAULT_NAME = "Default"
"""The name of the experiment of runs that have none."""


def add_experiment(tx: Transaction, experiment: Experiment) -> bool:
    """Store a new experiment; False if the project, which is locked in this transaction, has one with that name."""
    return insert_if_new(tx, experiments, msgspec.structs.asdict(experiment), ["project_id", "name"])


def find_highest_number(tx: Transaction, project_id: UUID) -> int:
    """The highest experiment number of a project so far."""
    query = sa.select(sa.func.max(experiments.c.number)).where(experiments.c.project_id == project_id)
    return tx.execute(query).scalar_one() or 0


def load_experiments(tx: Transaction, ids: Collection[UUID]) -> dict[UUID, Experiment]:
    """The experiments with these ids, by id; ids that do not exist are left out."""
    query = sa.select(experiments).where(experiments.c.id.in_(ids))
    return {experiment.id: experiment for experiment in find_all(tx, Experiment, query)}


def find_experiment_by_name(tx: Transaction, project_id: UUID, name: str) -> Experiment | None:
    """The project's experiment with this name."""
    return find_one(tx, Experiment, _of_project(project_id).where(experiments.c.name == name))


def find_experiments(tx: Transaction, project_id: UUID, numbers: Collection[int]) -> list[Experiment]:
    """Those of these experiments of a project that are stored."""
    query = _of_project(project_id).where(experiments.c.number.in_(numbers))
    return find_all(tx, Experiment, query)


def list_experiment_ids(tx: Transaction, project_id: UUID, name: str | None = None) -> list[UUID]:
    """The ids of a project's stored experiments, newest first; `name`: of the one with this name."""
    named = match_given({experiments.c.project_id: project_id, experiments.c.name: name})
    query = sa.select(experiments.c.id).where(*named)
    return list(tx.execute(query.order_by(experiments.c.number.desc())).scalars())


def _of_project(project_id: UUID) -> sa.Select[Any]:
    return sa.select(experiments).where(experiments.c.project_id == project_id)
