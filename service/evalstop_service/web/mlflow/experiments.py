"""Routes of experiments: create, get, search."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter

from evalstop_service.store import experiments
from evalstop_service.store.database import Transaction
from evalstop_service.store.experiments import Experiment
from evalstop_service.web.context import Db, Now
from evalstop_service.web.mlflow import labels
from evalstop_service.web.mlflow.authentication import Ingest, MlflowRoute, Read, ReadOrIngest
from evalstop_service.web.mlflow.errors import already_exists, invalid_parameter, not_found
from evalstop_service.web.mlflow.requests import CreateExperiment, Document, SearchExperiments, is_uuid
from evalstop_service.web.mlflow.responses import DEFAULT_ID, DEFAULT_NAME, experiment_document

router = APIRouter(prefix="/api/2.0/mlflow/experiments", route_class=MlflowRoute)


@router.post("/create")
def create_experiment(body: CreateExperiment, caller: Ingest, database: Db, now: Now) -> Document:
    """Create an experiment."""
    if labels.clean_text(body.name) != body.name:
        raise invalid_parameter(f"experiment {body.name!r:.100}: a name has no control characters")
    with database.transaction() as tx:
        experiment = (
            experiments.add_experiment(tx, caller.project_id, body.name, now) if body.name != DEFAULT_NAME else None
        )
    if experiment is None:
        raise already_exists(f"experiment {body.name!r} already exists")
    return {"experiment_id": experiment.id.hex}


@router.get("/get")
def get_experiment(caller: ReadOrIngest, database: Db, experiment_id: str) -> Document:
    """An experiment by its id."""
    with database.reading() as tx:
        return {"experiment": experiment_document(load_experiment(tx, caller.project_id, experiment_id))}


@router.get("/get-by-name")
def get_experiment_by_name(caller: ReadOrIngest, database: Db, experiment_name: str) -> Document:
    """An experiment by its name."""
    experiment = None
    if experiment_name != DEFAULT_NAME:
        with database.reading() as tx:
            experiment = experiments.find_experiment_by_name(tx, caller.project_id, labels.clean_text(experiment_name))
        if experiment is None:
            raise not_found(f"experiment {experiment_name!r:.500} does not exist in this project")
    return {"experiment": experiment_document(experiment)}


@router.post("/search")
def search_experiments(body: SearchExperiments, caller: Read, database: Db) -> Document:
    """All experiments, newest first, the default one last."""
    if body.filter or body.order_by:
        raise invalid_parameter("filter and order_by are not supported for experiments; the newest come first")
    if body.page_token is not None and not is_uuid(body.page_token):
        raise invalid_parameter(f"invalid page_token {body.page_token!r:.100}")
    before = None if body.page_token is None else UUID(body.page_token)
    limit = min(body.max_results, 1000)
    with database.reading() as tx:
        items = experiments.list_experiments(tx, caller.project_id, before, limit)
    if body.view_type == "DELETED_ONLY":
        return {"experiments": []}
    if len(items) == limit:
        return {
            "experiments": [experiment_document(item) for item in items],
            "next_page_token": items[-1].id.hex,
        }
    return {"experiments": [*map(experiment_document, items), experiment_document(None)]}


def load_experiment(tx: Transaction, project_id: UUID, experiment_id: str) -> Experiment | None:
    """The project's experiment with this id, None for the default one; raises MlflowError."""
    if experiment_id == DEFAULT_ID:
        return None
    experiment = experiments.find_experiment(tx, project_id, UUID(experiment_id)) if is_uuid(experiment_id) else None
    if experiment is None:
        raise not_found(f"experiment {experiment_id!r:.100} does not exist in this project")
    return experiment
