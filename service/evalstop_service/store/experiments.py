"""Experiments: what clients of MLflow call the folders of their runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction, insert_if_new
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import experiments


@dataclass(frozen=True)
class Experiment:
    """A folder by its name, which never changes."""

    id: UUID
    project_id: UUID
    name: str
    created_at: datetime


def add_experiment(tx: Transaction, project_id: UUID, name: str, now: datetime) -> Experiment | None:
    """Store a new experiment; None if the project has one of that name."""
    experiment = Experiment(new_id(), project_id, name, now)
    return experiment if insert_if_new(tx, experiments, vars(experiment), ["project_id", "name"]) else None


def find_experiment(tx: Transaction, project_id: UUID, experiment_id: UUID) -> Experiment | None:
    """The project's experiment with this id."""
    return _one(tx, project_id, experiments.c.id == experiment_id)


def find_experiment_by_name(tx: Transaction, project_id: UUID, name: str) -> Experiment | None:
    """The project's experiment with this name."""
    return _one(tx, project_id, experiments.c.name == name)


def list_experiments(
    tx: Transaction, project_id: UUID, before: UUID | None = None, limit: int = 1000
) -> list[Experiment]:
    """A project's experiments, newest first: those made before the experiment `before`."""
    query = sa.select(experiments).where(experiments.c.project_id == project_id)
    if before is not None:
        query = query.where(experiments.c.id < before)
    return [Experiment(**row) for row in tx.execute(query.order_by(experiments.c.id.desc()).limit(limit)).mappings()]


def _one(tx: Transaction, project_id: UUID, condition: sa.ColumnElement[bool]) -> Experiment | None:
    query = sa.select(experiments).where(experiments.c.project_id == project_id, condition)
    row = tx.execute(query).mappings().one_or_none()
    return Experiment(**row) if row else None
