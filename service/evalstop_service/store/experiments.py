"""Experiments: MLflow's name for the folders of runs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.store.database import Transaction, find_all, find_one, insert_if_new
from evalstop_service.store.mlflow_runs import Search, find_ids, read_member, read_milliseconds
from evalstop_service.store.tables import experiments

DEFAULT_NUMBER, DEFAULT_NAME = 0, "Default"
"""The experiment of runs that have none, including those that do not use MLflow."""


class Experiment(msgspec.Struct, frozen=True):
    """A row of experiments.

    `number`: the id that clients see, unique in the project; 0 is the default experiment, stored once it is changed.
    `artifact_location`: the folder that holds one folder of artifacts for each run.
    """

    id: UUID
    project_id: UUID
    number: int
    name: str
    artifact_location: str
    tags: dict[str, str]
    created_at: datetime
    updated_at: datetime
    deleted: bool = False

    @property
    def reference(self) -> UUID | None:
        """The value that rows refer to it by: None for the default experiment, which need not be stored."""
        return None if self.number == DEFAULT_NUMBER else self.id


def add_experiment(tx: Transaction, experiment: Experiment) -> bool:
    """Store a new experiment; False if the project, which is locked in this transaction, has one with that name."""
    return insert_if_new(tx, experiments, msgspec.structs.asdict(experiment), ["project_id", "name"])


def save_experiment(tx: Transaction, experiment: Experiment) -> bool:
    """Store the changes of an experiment; False if another one of the project has its name."""
    same_name = sa.select(experiments.c.id).where(
        experiments.c.project_id == experiment.project_id,
        experiments.c.name == experiment.name,
        experiments.c.id != experiment.id,
    )
    if tx.execute(same_name).first() is not None:
        return False
    values = msgspec.structs.asdict(experiment)
    tx.execute(experiments.update().where(experiments.c.id == experiment.id).values(values))
    return True


def find_highest_number(tx: Transaction, project_id: UUID) -> int:
    """The highest experiment number of a project so far."""
    query = sa.select(sa.func.max(experiments.c.number)).where(experiments.c.project_id == project_id)
    return tx.execute(query).scalar_one() or 0


def find_experiment(tx: Transaction, project_id: UUID, number: int) -> Experiment | None:
    """The project's experiment with this number."""
    return find_one(tx, Experiment, _of_project(project_id).where(experiments.c.number == number))


def load_experiments(tx: Transaction, ids: Collection[UUID]) -> dict[UUID, Experiment]:
    """The experiments with these ids, by id; ids that do not exist are left out."""
    query = sa.select(experiments).where(experiments.c.id.in_(ids))
    return {experiment.id: experiment for experiment in find_all(tx, Experiment, query)}


def lock_experiment(tx: Transaction, project_id: UUID, number: int) -> Experiment | None:
    """The project's experiment with this number, locked until the transaction ends."""
    query = _of_project(project_id).where(experiments.c.number == number)
    return find_one(tx, Experiment, query.with_for_update())


def find_experiment_by_name(tx: Transaction, project_id: UUID, name: str) -> Experiment | None:
    """The project's experiment with this name."""
    return find_one(tx, Experiment, _of_project(project_id).where(experiments.c.name == name))


def find_experiments(tx: Transaction, project_id: UUID, numbers: Collection[int]) -> list[Experiment]:
    """Those of these experiments of a project that are stored."""
    query = _of_project(project_id).where(experiments.c.number.in_(numbers))
    return find_all(tx, Experiment, query)


def search_experiments(tx: Transaction, default: Experiment, search: Search) -> list[UUID]:
    """The ids of the matching experiments of a project; `default` counts unless it is stored."""
    columns = [experiments.c[name] for name in ("id", "number", "name", "tags", "created_at", "updated_at", "deleted")]
    stored = sa.select(*columns).where(experiments.c.project_id == default.project_id)
    values = [sa.literal(getattr(default, column.name), column.type).label(column.name) for column in columns]
    changed = stored.where(experiments.c.number == DEFAULT_NUMBER).exists()
    listed = sa.union_all(stored, sa.select(*values).where(~changed)).subquery()
    searched = listed if search.deleted is None else _select_deleted(listed, search.deleted)
    fields = {
        "number": searched.c.number,
        "name": searched.c.name,
        "experiment_id": sa.cast(searched.c.number, sa.Text),
        "creation_time": read_milliseconds(tx, searched.c.created_at),
        "last_update_time": read_milliseconds(tx, searched.c.updated_at),
    }

    def find_field(kind: str, key: str) -> sa.ColumnElement[Any]:
        return read_member(tx, searched.c.tags, key) if kind == "tags" else fields[key]

    return find_ids(tx, searched, searched.c.id, find_field, search)


def _select_deleted(listed: sa.Subquery, deleted: bool) -> sa.Subquery:
    return sa.select(listed).where(listed.c.deleted == sa.literal(deleted)).subquery()


def _of_project(project_id: UUID) -> sa.Select[Any]:
    return sa.select(experiments).where(experiments.c.project_id == project_id)
