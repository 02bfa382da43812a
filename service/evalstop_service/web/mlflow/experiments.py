"""Routes of experiments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from fastapi import APIRouter
from msgspec.structs import replace

from evalstop_service.store import experiments, projects
from evalstop_service.store.database import Transaction
from evalstop_service.store.experiments import DEFAULT_NAME, DEFAULT_NUMBER, Experiment
from evalstop_service.store.ids import new_id
from evalstop_service.web.context import Caller, Db, Now
from evalstop_service.web.mlflow import labels, search
from evalstop_service.web.mlflow.artifact_folder import ArtifactFolder
from evalstop_service.web.mlflow.artifacts import Artifacts
from evalstop_service.web.mlflow.authentication import Ingest, MlflowRoute, ReadOrIngest
from evalstop_service.web.mlflow.errors import MlflowError, already_exists, invalid_parameter, not_found
from evalstop_service.web.mlflow.requests import (
    CreateExperiment,
    DeleteExperimentTag,
    Document,
    ExperimentBody,
    ExperimentTag,
    ItemIn,
    RenameExperiment,
    SearchExperiments,
)
from evalstop_service.web.mlflow.responses import default_experiment, experiment_document, is_visible

router = APIRouter(prefix="/experiments", route_class=MlflowRoute)

T = TypeVar("T")

MAX_EXPERIMENTS = 10_000
"""The number of newest experiments that a search covers."""


@router.post("/create")
def create_experiment(body: CreateExperiment, caller: Ingest, database: Db, now: Now, artifacts: Artifacts) -> Document:
    """Create an experiment; its artifacts are below the given location, or below the default root."""
    with database.transaction() as tx:
        projects.lock_project(tx, caller.project_id)  # two experiments never get the same number
        number = experiments.find_highest_number(tx, caller.project_id) + 1
        experiment = Experiment(
            id=new_id(),
            project_id=caller.project_id,
            number=number,
            name=_check_name(body.name),
            artifact_location=body.artifact_location or artifacts.locate(str(number)),
            tags=_to_tags({}, body.tags),
            created_at=now,
            updated_at=now,
        )
        if body.name == DEFAULT_NAME or not experiments.add_experiment(tx, experiment):
            raise already_exists(f"Experiment(name={body.name}) already exists")
    return {"experiment_id": str(number)}


@router.get("/get")
def get_experiment(caller: ReadOrIngest, database: Db, artifacts: Artifacts, experiment_id: str) -> Document:
    """An experiment by its id."""
    with database.reading() as tx:
        return {"experiment": experiment_document(load_experiment(tx, caller.project_id, experiment_id, artifacts))}


@router.get("/get-by-name")
def get_experiment_by_name(caller: ReadOrIngest, database: Db, artifacts: Artifacts, experiment_name: str) -> Document:
    """An experiment by its name."""
    with database.reading() as tx:
        experiment = experiments.find_experiment_by_name(tx, caller.project_id, labels.clean_text(experiment_name))
    if experiment is None and experiment_name == DEFAULT_NAME:
        experiment = default_experiment(caller.project_id, artifacts)
    if experiment is None:
        raise not_found(f"Could not find experiment with name {experiment_name!r:.500}")
    return {"experiment": experiment_document(experiment)}


@router.post("/update")
def rename_experiment(body: RenameExperiment, caller: Ingest, database: Db, now: Now, artifacts: Artifacts) -> Document:
    """Rename an experiment; its runs keep their names."""
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, artifacts)
        _refuse_default(experiment)
        renamed = replace(experiment, name=_check_name(body.new_name), updated_at=now)
        if body.new_name == DEFAULT_NAME or not experiments.save_experiment(tx, renamed):
            raise already_exists(f"Experiment(name={body.new_name}) already exists")
    return {}


@router.post("/delete")
def delete_experiment(body: ExperimentBody, caller: Ingest, database: Db, now: Now, artifacts: Artifacts) -> Document:
    """Mark an experiment as deleted, which hides it and its runs from searches. Nothing is deleted."""
    return _set_deleted(body, caller, database, now, artifacts, deleted=True)


@router.post("/restore")
def restore_experiment(body: ExperimentBody, caller: Ingest, database: Db, now: Now, artifacts: Artifacts) -> Document:
    """Show an experiment and its runs in searches again."""
    return _set_deleted(body, caller, database, now, artifacts, deleted=False)


@router.post("/set-experiment-tag")
def set_experiment_tag(body: ExperimentTag, caller: Ingest, database: Db, now: Now, artifacts: Artifacts) -> Document:
    """Set a tag of an experiment."""
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, artifacts)
        experiments.save_experiment(tx, replace(experiment, tags=_to_tags(experiment.tags, [body]), updated_at=now))
    return {}


@router.post("/delete-experiment-tag")
def delete_experiment_tag(
    body: DeleteExperimentTag, caller: Ingest, database: Db, now: Now, artifacts: Artifacts
) -> Document:
    """Remove a tag of an experiment."""
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, artifacts)
        if body.key not in experiment.tags:
            raise not_found(f"No tag with name: {body.key} in experiment with id {body.experiment_id}")
        tags = {key: value for key, value in experiment.tags.items() if key != body.key}
        experiments.save_experiment(tx, replace(experiment, tags=tags, updated_at=now))
    return {}


@router.post("/search")
def search_experiments(body: SearchExperiments, caller: ReadOrIngest, database: Db, artifacts: Artifacts) -> Document:
    """The matching experiments, by default newest first, with the default experiment last."""
    clauses = search.parse_filter(body.filter, search.EXPERIMENTS)
    orders = search.parse_orders(body.order_by, search.EXPERIMENTS)
    with database.reading() as tx:
        stored = experiments.list_experiments(tx, caller.project_id, MAX_EXPERIMENTS)
    if DEFAULT_NUMBER not in (experiment.number for experiment in stored):
        stored.append(default_experiment(caller.project_id, artifacts))
    chosen = [
        document
        for document in map(experiment_document, stored)
        if is_visible(document["lifecycle_stage"] == "deleted", body.view_type)
        and search.matches(clauses, _list_fields(document))
    ]
    page, token = paginate(search.sort(chosen, orders, _list_fields), body.offset, min(body.max_results, 1000))
    return {"experiments": page, **token}


def paginate(items: Sequence[T], offset: int, limit: int) -> tuple[Sequence[T], Document]:
    """A page of search results, and the token of the next page as part of the response."""
    following = offset + limit
    return items[offset:following], {"next_page_token": str(following)} if following < len(items) else {}


def load_experiment(tx: Transaction, project_id: UUID, experiment_id: str, artifacts: ArtifactFolder) -> Experiment:
    """The project's experiment with this id; raises MlflowError."""
    experiment = experiments.find_experiment(tx, project_id, _parse_number(experiment_id))
    if experiment is not None:
        return experiment
    if experiment_id == str(DEFAULT_NUMBER):
        return default_experiment(project_id, artifacts)
    raise _no_experiment(experiment_id)


def find_references(tx: Transaction, project_id: UUID, experiment_ids: Sequence[str]) -> list[UUID | None]:
    """The values by which rows refer to these experiments. As in MLflow an unknown one has no rows, and raises
    MlflowError only if it is no number."""
    references: list[UUID | None] = []
    for experiment_id in experiment_ids:
        if not re.fullmatch(r"[0-9]+", experiment_id, re.ASCII):
            raise invalid_parameter(f"Invalid experiment ID {experiment_id!r:.100}; it must be a number")
        number = int(experiment_id.lstrip("0")[:10] or "0")
        experiment = experiments.find_experiment(tx, project_id, number) if number < 1_000_000_000 else None
        if number == DEFAULT_NUMBER or experiment is not None:
            references.append(experiment.reference if experiment is not None else None)
    return references


def _lock_experiment(tx: Transaction, caller: Caller, experiment_id: str, artifacts: ArtifactFolder) -> Experiment:
    number = _parse_number(experiment_id)
    if number == DEFAULT_NUMBER:
        experiments.add_experiment(tx, default_experiment(caller.project_id, artifacts))
    experiment = experiments.lock_experiment(tx, caller.project_id, number)
    if experiment is None:
        raise _no_experiment(experiment_id)
    return experiment


def _parse_number(experiment_id: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", experiment_id):
        raise _no_experiment(experiment_id)
    return int(experiment_id)


def _no_experiment(experiment_id: str) -> MlflowError:
    return not_found(f"No Experiment with id={experiment_id:.100} exists")


def _refuse_default(experiment: Experiment) -> None:
    if experiment.number == DEFAULT_NUMBER:
        raise invalid_parameter("the default experiment cannot be renamed or deleted; create another one")


def _set_deleted(
    body: ExperimentBody, caller: Caller, database: Db, now: datetime, artifacts: ArtifactFolder, *, deleted: bool
) -> Document:
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, artifacts)
        _refuse_default(experiment)
        if experiment.deleted != deleted:
            experiments.save_experiment(tx, replace(experiment, deleted=deleted, updated_at=now))
    return {}


def _check_name(name: str) -> str:
    if labels.clean_text(name) != name:
        raise invalid_parameter(f"experiment {name!r:.100}: a name has no control characters")
    return name


def _to_tags(current: dict[str, str], tags: Sequence[ItemIn]) -> dict[str, str]:
    merged = labels.merge_items(current, [tag.to_item() for tag in tags])
    if merged.dropped:
        raise invalid_parameter(f"an experiment has at most {labels.MOST_LABELS} tags")
    return merged.labels


def _list_fields(document: Document) -> search.Fields:
    return {"attributes": document, "tags": {tag["key"]: tag["value"] for tag in document["tags"]}}
