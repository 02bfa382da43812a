"""Routes of experiments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID, uuid5

import msgspec
from fastapi import APIRouter, Depends, Request
from msgspec.structs import replace

from evalstop_service.domain.quotas import Quota
from evalstop_service.store import counts, mlflow, projects
from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.mlflow import DEFAULT_NAME, DEFAULT_NUMBER, Clause, Experiment, Order, Search
from evalstop_service.web.context import Caller, Ctx, Db, Now
from evalstop_service.web.mlflow import requests, search
from evalstop_service.web.mlflow.protocol import (
    Ingest,
    MlflowError,
    MlflowRoute,
    ReadOrIngest,
    already_exists,
    invalid_parameter,
    not_found,
)
from evalstop_service.web.mlflow.requests import (
    CreateExperiment,
    DeleteExperimentTag,
    Document,
    ExperimentBody,
    ExperimentTag,
    ItemIn,
    Page,
    RenameExperiment,
    SearchExperiments,
    to_milliseconds,
)

router = APIRouter(prefix="/experiments", route_class=MlflowRoute)

MAX_PAGE, PAGE_BYTES = 1000, 4 << 20
"""What a page of a search holds: so many items, and none after this many bytes, in JSON."""
LOADED_AT_ONCE = 20

_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


async def _read_root(request: Request) -> str:
    root: str = request.app.state.artifacts.root
    return root


Root = Annotated[str, Depends(_read_root)]
"""The URI below which experiments store their artifacts, unless they name another."""


@router.post("/create")
def create_experiment(body: CreateExperiment, caller: Ingest, database: Db, now: Now, root: Root) -> Document:
    """Create an experiment; its artifacts are below the given location, or below the default root."""
    with database.transaction() as tx:
        project = projects.lock_project(tx, caller.project_id)  # two experiments never get the same number
        counts.require_room(tx, project, Quota.EXPERIMENTS, now)
        number = mlflow.find_highest_number(tx, caller.project_id) + 1
        experiment = Experiment(
            id=new_id(),
            project_id=caller.project_id,
            number=number,
            name=_check_name(body.name),
            artifact_location=body.artifact_location or _locate(root, number),
            tags=_to_tags({}, body.tags),
            created_at=now,
            updated_at=now,
        )
        if body.name == DEFAULT_NAME or not mlflow.add_experiment(tx, experiment):
            raise already_exists(f"Experiment(name={body.name}) already exists")
    return {"experiment_id": str(number)}


@router.get("/get")
def get_experiment(caller: ReadOrIngest, database: Db, root: Root, experiment_id: str) -> Document:
    """An experiment by its id."""
    with database.reading() as tx:
        return {"experiment": experiment_document(load_experiment(tx, caller.project_id, experiment_id, root))}


@router.get("/get-by-name")
def get_experiment_by_name(caller: ReadOrIngest, database: Db, root: Root, experiment_name: str) -> Document:
    """An experiment by its name."""
    with database.reading() as tx:
        experiment = mlflow.find_experiment_by_name(tx, caller.project_id, requests.clean_text(experiment_name))
    if experiment is None and experiment_name == DEFAULT_NAME:
        experiment = default_experiment(caller.project_id, root)
    if experiment is None:
        raise not_found(f"Could not find experiment with name {experiment_name!r:.500}")
    return {"experiment": experiment_document(experiment)}


@router.post("/update")
def rename_experiment(body: RenameExperiment, caller: Ingest, database: Db, now: Now, root: Root) -> Document:
    """Rename an experiment; its runs keep their names."""
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, root)
        _refuse_default(experiment)
        renamed = replace(experiment, name=_check_name(body.new_name), updated_at=now)
        if body.new_name == DEFAULT_NAME or not mlflow.save_experiment(tx, renamed):
            raise already_exists(f"Experiment(name={body.new_name}) already exists")
    return {}


@router.post("/delete")
def delete_experiment(body: ExperimentBody, caller: Ingest, database: Db, now: Now, root: Root) -> Document:
    """Mark an experiment as deleted, which hides it and its runs from searches. Nothing is deleted."""
    return _set_deleted(body, caller, database, now, root, deleted=True)


@router.post("/restore")
def restore_experiment(body: ExperimentBody, caller: Ingest, database: Db, now: Now, root: Root) -> Document:
    """Show an experiment and its runs in searches again."""
    return _set_deleted(body, caller, database, now, root, deleted=False)


@router.post("/set-experiment-tag")
def set_experiment_tag(body: ExperimentTag, caller: Ingest, database: Db, now: Now, root: Root) -> Document:
    """Set a tag of an experiment."""
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, root)
        mlflow.save_experiment(tx, replace(experiment, tags=_to_tags(experiment.tags, [body]), updated_at=now))
    return {}


@router.post("/delete-experiment-tag")
def delete_experiment_tag(body: DeleteExperimentTag, caller: Ingest, database: Db, now: Now, root: Root) -> Document:
    """Remove a tag of an experiment."""
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, root)
        if body.key not in experiment.tags:
            raise not_found(f"No tag with name: {body.key} in experiment with id {body.experiment_id}")
        tags = {key: value for key, value in experiment.tags.items() if key != body.key}
        mlflow.save_experiment(tx, replace(experiment, tags=tags, updated_at=now))
    return {}


@router.post("/search")
def search_experiments(body: SearchExperiments, caller: ReadOrIngest, context: Ctx, root: Root) -> Document:
    """The matching experiments, by default newest first, with the default experiment last."""
    orders = [*search.parse_orders(body.order_by, search.EXPERIMENTS), Order("attributes", "number", True)]
    query = make_search(body, search.parse_filter(body.filter, search.EXPERIMENTS), orders, body.view_type)
    default = default_experiment(caller.project_id, root)
    with context.limits.spend_on_search(), context.database.reading() as tx:
        ids = mlflow.search_experiments(tx, default, query)

        def load(ids: Sequence[UUID]) -> Iterator[Document]:
            stored = {default.id: default} | mlflow.load_experiments(tx, ids)
            return (experiment_document(stored[experiment_id]) for experiment_id in ids)

        page, token = fill_page(ids, query, load)
    return {"experiments": page, **token}


def make_search(body: Page, clauses: list[Clause], orders: list[Order], view: str) -> Search:
    """The search for a page, and one item more, which shows whether it is the last."""
    deleted = None if view == "ALL" else view == "DELETED_ONLY"
    return Search(clauses, orders, deleted, body.offset, min(body.max_results, MAX_PAGE) + 1)


def fill_page(
    ids: Sequence[UUID], query: Search, load: Callable[[Sequence[UUID]], Iterator[Document]]
) -> tuple[list[Document], Document]:
    """As many documents of a search as a page may hold, and the token of the next page as part of the response."""
    page: list[Document] = []
    size, wanted = 0, ids[: query.limit - 1]
    for start in range(0, len(wanted), LOADED_AT_ONCE):
        for document in load(wanted[start : start + LOADED_AT_ONCE]):
            size += len(msgspec.json.encode(document))
            page.append(document)
            if size > PAGE_BYTES:
                break
        if size > PAGE_BYTES:
            break
    return page, {"next_page_token": str(query.offset + len(page))} if len(page) < len(ids) else {}


def default_experiment(project_id: UUID, root: str) -> Experiment:
    """The default experiment of a project, if it was never changed."""
    return Experiment(
        id=uuid5(project_id, DEFAULT_NAME),
        project_id=project_id,
        number=DEFAULT_NUMBER,
        name=DEFAULT_NAME,
        artifact_location=_locate(root, DEFAULT_NUMBER),
        tags={},
        created_at=_LONG_AGO,
        updated_at=_LONG_AGO,
    )


def experiment_document(experiment: Experiment) -> Document:
    """An experiment."""
    return {
        "experiment_id": str(experiment.number),
        "name": experiment.name,
        "artifact_location": experiment.artifact_location,
        "lifecycle_stage": "deleted" if experiment.deleted else "active",
        "tags": pair_documents(experiment.tags),
        "creation_time": to_milliseconds(experiment.created_at),
        "last_update_time": to_milliseconds(experiment.updated_at),
    }


def pair_documents(pairs: Mapping[str, str]) -> list[Document]:
    """Tags or params."""
    return [{"key": key, "value": value} for key, value in pairs.items()]


def load_experiment(tx: Transaction, project_id: UUID, experiment_id: str, root: str) -> Experiment:
    """The project's experiment with this id; raises MlflowError."""
    experiment = mlflow.find_experiment(tx, project_id, _parse_number(experiment_id))
    if experiment is not None:
        return experiment
    if experiment_id == str(DEFAULT_NUMBER):
        return default_experiment(project_id, root)
    raise _no_experiment(experiment_id)


def find_references(tx: Transaction, project_id: UUID, experiment_ids: Sequence[str]) -> list[UUID | None]:
    """The values by which rows refer to these experiments. As in MLflow an unknown one has no rows, and raises
    MlflowError only if it is no number."""
    for experiment_id in experiment_ids:
        if not re.fullmatch(r"[0-9]+", experiment_id, re.ASCII):
            raise invalid_parameter(f"Invalid experiment ID {experiment_id!r:.100}; it must be a number")
    numbers = {int(text) for text in (text.lstrip("0") or "0" for text in experiment_ids) if len(text) < 10}
    stored = mlflow.find_experiments(tx, project_id, numbers)
    return [experiment.reference for experiment in stored] + ([None] if DEFAULT_NUMBER in numbers else [])


def _lock_experiment(tx: Transaction, caller: Caller, experiment_id: str, root: str) -> Experiment:
    number = _parse_number(experiment_id)
    if number == DEFAULT_NUMBER:
        mlflow.add_experiment(tx, default_experiment(caller.project_id, root))
    experiment = mlflow.lock_experiment(tx, caller.project_id, number)
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
    body: ExperimentBody, caller: Caller, database: Db, now: datetime, root: str, *, deleted: bool
) -> Document:
    with database.transaction() as tx:
        experiment = _lock_experiment(tx, caller, body.experiment_id, root)
        _refuse_default(experiment)
        if experiment.deleted != deleted:
            mlflow.save_experiment(tx, replace(experiment, deleted=deleted, updated_at=now))
    return {}


def _check_name(name: str) -> str:
    if requests.clean_text(name) != name:
        raise invalid_parameter(f"experiment {name!r:.100}: a name has no control characters")
    return name


def _to_tags(current: dict[str, str], tags: Sequence[ItemIn]) -> dict[str, str]:
    merged = requests.merge_items(current, [tag.to_item() for tag in tags])
    if merged.dropped:
        raise invalid_parameter(f"an experiment has at most {requests.MOST_LABELS} tags")
    return merged.labels


def _locate(root: str, number: int) -> str:
    return f"{root.rstrip('/')}/{number}"
