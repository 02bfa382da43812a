"""Routes of experiments, which are created, read and listed, and never change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID, uuid5

from fastapi import APIRouter, Depends, Request

from evalstop_service.store import counts, mlflow, projects
from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.mlflow import DEFAULT_NAME, DEFAULT_NUMBER, Experiment
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.context import Ctx, Db, Ingest, Now, ReadOrIngest
from evalstop_service.web.limits import SEARCH_COST
from evalstop_service.web.mlflow import requests
from evalstop_service.web.mlflow.protocol import API, MlflowError, invalid_parameter, not_found
from evalstop_service.web.mlflow.requests import CreateExperiment, Document, SearchExperiments, to_milliseconds

router = APIRouter(prefix=f"{API}/mlflow/experiments", route_class=JsonRoute)

_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


async def _read_root(request: Request) -> str:
    root: str = request.app.state.artifacts.root
    return root


Root = Annotated[str, Depends(_read_root)]
"""The URI below which experiments store their artifacts, unless they name another."""


@router.post("/create")
def create_experiment(body: CreateExperiment, caller: Ingest, database: Db, now: Now, root: Root) -> Document:
    """Create an experiment; its artifacts are below the given location, or below the default root."""
    if requests.clean_text(body.name) != body.name:
        raise invalid_parameter(f"experiment {body.name!r:.100}: a name has no control characters")
    tags, dropped = requests.merge_items({}, requests.list_items(body.tags))
    if dropped:
        raise invalid_parameter(f"an experiment has at most {requests.MOST_LABELS} tags")
    with database.transaction() as tx:
        project = projects.lock_project(tx, caller.project_id)  # two experiments never get the same number
        counts.require_room(tx, project, "experiments", now)
        number = mlflow.find_highest_number(tx, caller.project_id) + 1
        location = body.artifact_location or _locate(root, number)
        experiment = Experiment(new_id(), caller.project_id, number, body.name, location, tags, now)
        if body.name == DEFAULT_NAME or not mlflow.add_experiment(tx, experiment):
            raise MlflowError(400, "RESOURCE_ALREADY_EXISTS", f"Experiment(name={body.name}) already exists")
    return {"experiment_id": str(number)}


@router.get("/get")
def get_experiment(caller: ReadOrIngest, database: Db, root: Root, experiment_id: str) -> Document:
    """An experiment by its id."""
    with database.reading() as tx:
        return {"experiment": _describe_experiment(load_experiment(tx, caller.project_id, experiment_id, root))}


@router.get("/get-by-name")
def get_experiment_by_name(caller: ReadOrIngest, database: Db, root: Root, experiment_name: str) -> Document:
    """An experiment by its name."""
    with database.reading() as tx:
        experiment = mlflow.find_experiment_by_name(tx, caller.project_id, requests.clean_text(experiment_name))
    if experiment_name == DEFAULT_NAME:
        experiment = default_experiment(caller.project_id, root)
    if experiment is None:
        raise not_found(f"Could not find experiment with name {experiment_name!r:.500}")
    return {"experiment": _describe_experiment(experiment)}


_NAME_FILTER = re.compile(r"\s*(?:attributes?\.)?name\s*=\s*['\"]([^'\"]*)['\"]\s*")
"""How training scripts, such as accelerate's tracker, look for an experiment."""


@router.post("/search")
def search_experiments(body: SearchExperiments, caller: ReadOrIngest, context: Ctx, root: Root) -> Document:
    """All experiments, newest first, with the default experiment last; or the one with the name in the filter."""
    named = _NAME_FILTER.fullmatch(body.filter or "")
    if body.filter and named is None:
        raise invalid_parameter("filter: experiments are found by name = '...' alone")
    name = named[1] if named else None
    default = default_experiment(caller.project_id, root)
    context.limits.spend_costly(SEARCH_COST)
    with context.database.reading() as tx:
        ids = mlflow.list_experiment_ids(tx, caller.project_id, name)
        ids += [default.id] if name in (None, DEFAULT_NAME) else []
        page = ids[body.offset : body.offset + body.limit]
        stored = {default.id: default} | mlflow.load_experiments(tx, page)
    documents = [_describe_experiment(stored[experiment_id]) for experiment_id in page]
    return body.make_page("experiments", documents, is_last=len(ids) <= body.offset + body.limit)


def default_experiment(project_id: UUID, root: str) -> Experiment:
    """The default experiment of a project, which is not stored."""
    location = _locate(root, DEFAULT_NUMBER)
    return Experiment(
        uuid5(project_id, DEFAULT_NAME), project_id, DEFAULT_NUMBER, DEFAULT_NAME, location, {}, _LONG_AGO
    )


def _describe_experiment(experiment: Experiment) -> Document:
    created = to_milliseconds(experiment.created_at)
    return {
        "experiment_id": str(experiment.number),
        "name": experiment.name,
        "artifact_location": experiment.artifact_location,
        "lifecycle_stage": "active",
        "tags": pair_documents(experiment.tags),
        "creation_time": created,
        "last_update_time": created,
    }


def pair_documents(pairs: Mapping[str, str]) -> list[Document]:
    """Tags or params."""
    return [{"key": key, "value": value} for key, value in pairs.items()]


def load_experiment(tx: Transaction, project_id: UUID, experiment_id: str, root: str) -> Experiment:
    """The project's experiment with this id; raises MlflowError."""
    if experiment_id == str(DEFAULT_NUMBER):
        return default_experiment(project_id, root)
    is_number = re.fullmatch(r"[1-9][0-9]{0,8}", experiment_id)
    stored = mlflow.find_experiments(tx, project_id, [int(experiment_id)]) if is_number else []
    if not stored:
        raise not_found(f"No Experiment with id={experiment_id:.100} exists")
    return stored[0]


def find_references(tx: Transaction, project_id: UUID, experiment_ids: Sequence[str]) -> list[UUID | None]:
    """What rows have in place of these experiments. As in MLflow an unknown one has no rows."""
    numbers = {int(text) for text in experiment_ids if len(text) < 10}  # of MLflow's file store they are longer
    stored = mlflow.find_experiments(tx, project_id, numbers)
    return [experiment.id for experiment in stored] + ([None] if DEFAULT_NUMBER in numbers else [])


def _locate(root: str, number: int) -> str:
    return f"{root.rstrip('/')}/{number}"
