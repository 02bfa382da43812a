"""Experiments: made, found by name or id, listed."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from fastapi import APIRouter

from evalstop_service.store import experiments
from evalstop_service.store.database import Transaction
from evalstop_service.store.experiments import Experiment
from evalstop_service.web.context import Db, Now
from evalstop_service.web.mlflow import labels
from evalstop_service.web.mlflow.authentication import Either, Ingesting, Reading, Verb
from evalstop_service.web.mlflow.errors import exists, invalid, missing
from evalstop_service.web.mlflow.requests import CreateExperiment, SearchExperiments, is_id
from evalstop_service.web.mlflow.responses import DEFAULT_ID, DEFAULT_NAME, experiment_document

router = APIRouter(prefix="/api/2.0/mlflow/experiments", route_class=Verb)


@router.post("/create")
def create_experiment(body: CreateExperiment, caller: Ingesting, database: Db, now: Now) -> dict[str, Any]:
    """Make an experiment."""
    if labels.clean(body.name) != body.name:
        raise invalid(f"experiment {body.name!r:.100}: its name may hold no control characters")
    with database.transaction() as tx:
        experiment = (
            experiments.add_experiment(tx, caller.project_id, body.name, now) if body.name != DEFAULT_NAME else None
        )
    if experiment is None:
        raise exists(f"there is an experiment called {body.name!r} already")
    return {"experiment_id": experiment.id.hex}


@router.get("/get")
def get_experiment(caller: Either, database: Db, experiment_id: str) -> dict[str, Any]:
    """An experiment by its id."""
    with database.reading() as tx:
        return {"experiment": experiment_document(found(tx, caller.project_id, experiment_id))}


@router.get("/get-by-name")
def get_experiment_by_name(caller: Either, database: Db, experiment_name: str) -> dict[str, Any]:
    """An experiment by its name."""
    experiment = None
    if experiment_name != DEFAULT_NAME:
        with database.reading() as tx:
            experiment = experiments.find_experiment_by_name(tx, caller.project_id, labels.clean(experiment_name))
        if experiment is None:
            raise missing(f"there is no experiment called {experiment_name!r:.500} in this project")
    return {"experiment": experiment_document(experiment)}


@router.post("/search")
def search_experiments(body: SearchExperiments, caller: Reading, database: Db) -> dict[str, Any]:
    """All experiments, newest first and the default one last."""
    if body.filter or body.order_by:
        raise invalid("experiments are answered newest first; neither filter nor order_by is understood here")
    if body.page_token is not None and not is_id(body.page_token):
        raise invalid(f"page_token {body.page_token!r:.100} is not one that this service gave")
    before = None if body.page_token is None else UUID(body.page_token)
    most = min(body.max_results, 1000)
    with database.reading() as tx:
        items = experiments.list_experiments(tx, caller.project_id, before, most)
    if body.view_type == "DELETED_ONLY":
        return {"experiments": []}
    if len(items) == most:
        return {
            "experiments": [experiment_document(item) for item in items],
            "next_page_token": items[-1].id.hex,
        }
    return {"experiments": [*map(experiment_document, items), experiment_document(None)]}


def found(tx: Transaction, project_id: UUID, experiment_id: str) -> Experiment | None:
    """The project's experiment with this id, None for the default one. Raises Failure."""
    if experiment_id == DEFAULT_ID:
        return None
    experiment = experiments.find_experiment(tx, project_id, UUID(experiment_id)) if is_id(experiment_id) else None
    if experiment is None:
        raise missing(f"there is no experiment {experiment_id!r:.100} in this project")
    return experiment
