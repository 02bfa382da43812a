"""Routes of logged models: autologging's data about saved models is stored unchanged, for reading it back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from fastapi import APIRouter

from evalstop_service.store import mlflow_runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.mlflow_runs import LoggedModel
from evalstop_service.web.context import Caller, Db, Now
from evalstop_service.web.mlflow import requests, search
from evalstop_service.web.mlflow.artifacts import Artifacts
from evalstop_service.web.mlflow.authentication import Ingest, MlflowRoute, ReadOrIngest
from evalstop_service.web.mlflow.errors import not_found
from evalstop_service.web.mlflow.experiments import find_references, load_experiment, paginate
from evalstop_service.web.mlflow.requests import Document, is_uuid, to_milliseconds

router = APIRouter(prefix="/logged-models", route_class=MlflowRoute)

MAX_MODELS = 10_000
"""The number of newest models that a search covers."""

_ID_PREFIX = "m-"


@router.post("")
def create_model(body: requests.CreateModel, caller: Ingest, database: Db, now: Now, artifacts: Artifacts) -> Document:
    """Create a model; its files are below the artifacts of its experiment."""
    own_id = new_id()
    model_id = f"{_ID_PREFIX}{own_id.hex}"
    with database.transaction() as tx:
        experiment = load_experiment(tx, caller.project_id, body.experiment_id, artifacts)
        attributes = {"model_type": body.model_type, "source_run_id": body.source_run_id}
        document = {
            "info": {
                "model_id": model_id,
                "experiment_id": body.experiment_id,
                "name": body.name or f"model-{own_id.hex[-8:]}",
                "creation_timestamp_ms": to_milliseconds(now),
                "last_updated_timestamp_ms": to_milliseconds(now),
                "artifact_uri": f"{experiment.artifact_location.rstrip('/')}/models/{model_id}/artifacts",
                "status": "LOGGED_MODEL_PENDING",
                "tags": _to_pairs(body.tags),
                **{name: value for name, value in attributes.items() if value},
            },
            "data": {"params": _to_pairs(body.params), "metrics": []},
        }
        run_id = UUID(body.source_run_id) if is_uuid(body.source_run_id) else own_id
        model = LoggedModel(run_id, own_id, caller.project_id, experiment.reference, document)
        mlflow_runs.add_logged_model(tx, model)
    return {"model": document}


@router.get("/{model_id}")
def get_model(model_id: str, caller: ReadOrIngest, database: Db) -> Document:
    """A model by its id."""
    with database.reading() as tx:
        return {"model": _require_model(_find_model(tx, caller.project_id, model_id), model_id).document}


@router.patch("/{model_id}")
def finalize_model(model_id: str, body: requests.FinalizeModel, caller: Ingest, database: Db, now: Now) -> Document:
    """Report whether a model was saved completely."""
    return _change_model(database, caller, model_id, now, lambda document: _with_info(document, status=body.status))


@router.delete("/{model_id}")
def delete_model(model_id: str, caller: Ingest, database: Db, now: Now) -> Document:
    """Mark a model as deleted, which hides it. Its files stay."""
    _change_model(database, caller, model_id, now, lambda document: _with_info(document, lifecycle_stage="deleted"))
    return {}


@router.patch("/{model_id}/tags")
def set_model_tags(model_id: str, body: requests.ModelTags, caller: Ingest, database: Db, now: Now) -> Document:
    """Set tags of a model."""
    return _change_model(
        database,
        caller,
        model_id,
        now,
        lambda document: _with_info(document, tags=_merge_pairs(document["info"]["tags"], _to_pairs(body.tags))),
    )


@router.delete("/{model_id}/tags/{tag_key:path}")
def delete_model_tag(model_id: str, tag_key: str, caller: Ingest, database: Db, now: Now) -> Document:
    """Remove a tag of a model."""

    def remove(document: Document) -> Document:
        remaining = [tag for tag in document["info"]["tags"] if tag["key"] != tag_key]
        if remaining == document["info"]["tags"]:
            raise not_found(f"No tag with key {tag_key!r:.100} on model {model_id!r:.100}")
        return _with_info(document, tags=remaining)

    _change_model(database, caller, model_id, now, remove)
    return {}


@router.post("/{model_id}/params")
def log_model_params(model_id: str, body: requests.ModelParams, caller: Ingest, database: Db, now: Now) -> Document:
    """Add params of a model."""

    def add(document: Document) -> Document:
        data = document["data"]
        return document | {"data": data | {"params": _merge_pairs(data["params"], _to_pairs(body.params))}}

    _change_model(database, caller, model_id, now, add)
    return {}


@router.post("/search")
def search_models(body: requests.SearchModels, caller: ReadOrIngest, database: Db) -> Document:
    """The matching models of experiments, by default newest first."""
    clauses = search.parse_filter(body.filter, search.MODELS)
    orders = search.parse_orders(
        (f"{order.get('field_name')} {'ASC' if order.get('ascending', True) else 'DESC'}" for order in body.order_by),
        search.MODELS,
    )
    with database.reading() as tx:
        ids = find_references(tx, caller.project_id, body.experiment_ids)
        models = mlflow_runs.list_logged_models(tx, caller.project_id, ids, MAX_MODELS)
    chosen = [
        model.document
        for model in models
        if model.document["info"].get("lifecycle_stage") != "deleted"
        and search.matches(clauses, _list_fields(model.document))
    ]
    page, token = paginate(search.sort(chosen, orders, _list_fields), int(body.page_token or 0), body.max_results)
    return {"models": page, **token}


def store_model_metrics(database: Database, project_id: UUID, run_id: UUID, metrics: list[requests.MetricIn]) -> None:
    """Store the last value of each metric logged for a model; unknown models are ignored."""
    for model_id in dict.fromkeys(metric.model_id for metric in metrics if metric.model_id):
        new = [metric for metric in metrics if metric.model_id == model_id]
        documents = [metric.model_dump(mode="json", exclude_none=True) | {"run_id": run_id.hex} for metric in new]
        with database.transaction() as tx:
            model = _find_model(tx, project_id, model_id, lock=True)
            if model is None:
                continue
            data = model.document["data"]
            last = {(item["key"], item.get("dataset_name")): item for item in (*data["metrics"], *documents)}
            newest = list(last.values())[: requests.MAX_METRICS]
            document = model.document | {"data": data | {"metrics": newest}}
            mlflow_runs.save_logged_model(tx, msgspec.structs.replace(model, document=document))


def _change_model(
    database: Database, caller: Caller, model_id: str, now: datetime, change: Callable[[Document], Document]
) -> Document:
    """The model after a change. Raises MlflowError."""
    with database.transaction() as tx:
        model = _require_model(_find_model(tx, caller.project_id, model_id, lock=True), model_id)
        changed = change(model.document)
        if changed != model.document:
            changed = _with_info(changed, last_updated_timestamp_ms=to_milliseconds(now))
            mlflow_runs.save_logged_model(tx, msgspec.structs.replace(model, document=changed))
    return {"model": changed}


def _find_model(tx: Transaction, project_id: UUID, model_id: str, *, lock: bool = False) -> LoggedModel | None:
    own_id = model_id.removeprefix(_ID_PREFIX)
    return mlflow_runs.find_logged_model(tx, project_id, UUID(own_id), lock=lock) if is_uuid(own_id) else None


def _require_model(model: LoggedModel | None, model_id: str) -> LoggedModel:
    """The model, unless there is none or it was deleted; raises MlflowError."""
    if model is None or model.document["info"].get("lifecycle_stage") == "deleted":
        raise not_found(f"Logged model with ID '{model_id[:100]}' not found.")
    return model


def _with_info(document: Document, **changes: Any) -> Document:
    return document | {"info": document["info"] | changes}


def _to_pairs(items: list[requests.ItemIn]) -> list[Document]:
    return [item.model_dump() for item in items]


def _merge_pairs(current: list[Document], new: list[Document]) -> list[Document]:
    merged = {item["key"]: item for item in (*current, *new)}
    return list(merged.values())


def _list_fields(document: Document) -> search.Fields:
    info = document["info"]
    times = {
        "creation_timestamp": info["creation_timestamp_ms"],
        "last_updated_timestamp": info["last_updated_timestamp_ms"],
    }
    data = document["data"]
    return {
        "attributes": info | times,
        "tags": {tag["key"]: tag["value"] for tag in info["tags"]},
        "params": {param["key"]: param["value"] for param in data["params"]},
        "metrics": {metric["key"]: float(metric["value"]) for metric in data["metrics"]},  # NaN is stored as a text
    }
