"""Routes of runs and of the values of their metrics."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query
from msgspec.structs import replace

from evalstop_service.ingest import open_run
from evalstop_service.rules.fields import Name
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store import mlflow_runs, observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.mlflow_runs import MlflowRun
from evalstop_service.store.runs import Run
from evalstop_service.web.context import Context, Ctx, Db
from evalstop_service.web.mlflow import labels, requests, responses, search
from evalstop_service.web.mlflow.artifact_folder import SCHEME, ArtifactFolder
from evalstop_service.web.mlflow.artifacts import Artifacts, file_documents
from evalstop_service.web.mlflow.authentication import MlflowRoute, Read, ReadOrIngest
from evalstop_service.web.mlflow.errors import invalid_parameter, not_found
from evalstop_service.web.mlflow.experiments import find_references, load_experiment, paginate
from evalstop_service.web.mlflow.labels import Item
from evalstop_service.web.mlflow.logged_models import store_model_metrics
from evalstop_service.web.mlflow.requests import Document
from evalstop_service.web.mlflow.responses import RecordedRun, is_visible, load_recorded
from evalstop_service.web.mlflow.run_logger import Logger, QueriedRun, RunLogger, load_run, parse_run_id

MAX_SCANNED_RUNS = 5000
"""The number of newest runs that a search covers."""

_NEWEST_FIRST = [search.Order("attributes", "start_time", True), search.Order("attributes", "run_id", False)]

router = APIRouter(route_class=MlflowRoute)


@router.post("/runs/create")
def create_run(body: requests.CreateRun, logger: Logger, artifacts: Artifacts) -> Document:
    """Create a run; always a new one, as in MLflow."""
    tags = [tag.to_item() for tag in body.tags]
    sent_name = body.run_name or dict(tags).get(labels.RUN_NAME, "")
    name = labels.clean_text(sent_name).strip() or "run"
    tags += [Item(labels.RUN_NAME, name), *([Item(labels.USER, body.user_id)] if body.user_id else [])]
    run_labels, _ = labels.merge_tags({}, tags)
    with logger.database.transaction() as tx:
        experiment = load_experiment(tx, logger.project_id, body.experiment_id, artifacts)
        if experiment.reference is not None:
            name = f"{experiment.name}/{name}"
            run_labels |= {labels.EXPERIMENT: experiment.name}
        request = open_run.OpenRequest(name, recognise=True, labels=run_labels, actor=logger.actor, key=logger.key)
        run = open_run.create_run(tx, logger.project_id, request, logger.now)
        mlflow_runs.add_mlflow_run(tx, MlflowRun(run.id, experiment.reference, start_time=body.start_time))
    logger.register_checkpoints(run.id, tags)
    logger.forward(run.id, None, {})
    with logger.database.reading() as tx:
        return {"run": _run_document(tx, run, logger.context, artifacts)}


@router.get("/runs/get")
def get_run(caller: ReadOrIngest, context: Ctx, database: Db, artifacts: Artifacts, run_id: QueriedRun) -> Document:
    """A run with its newest values; the tag `evalstop.should_stop` says whether to stop."""
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, run_id)
        return {"run": _run_document(tx, run, context, artifacts)}


@router.post("/runs/update")
def update_run(body: requests.UpdateRun, logger: Logger, artifacts: Artifacts) -> Document:
    """Change the status or the name of a run."""
    run_id = parse_run_id(body.run_id, body.run_uuid)
    match body.status:
        case "FINISHED" | "FAILED" | "KILLED":
            logger.finish_run(run_id, RunStatus.COMPLETED if body.status == "FINISHED" else RunStatus.FAILED)
            if body.end_time is not None:
                logger.change_mlflow_run(run_id, lambda current: replace(current, end_time=body.end_time))
        case "RUNNING":
            open_run.reopen_run(logger.database, logger.project_id, run_id, logger.actor, logger.now)
        case None | "SCHEDULED" | "UNFINISHED":
            pass
        case _:
            raise invalid_parameter(f"status {body.status!r:.100}: one of RUNNING, SCHEDULED, FINISHED, FAILED, KILLED")
    if body.run_name:
        logger.store_tags(run_id, [Item(labels.RUN_NAME, body.run_name)])
    logger.forward(run_id, "runs/update", _dump_request(body))
    with logger.database.reading() as tx:
        run = load_run(tx, logger.project_id, run_id)
        return {"run_info": responses.run_info(load_recorded(tx, [run], artifacts)[0])}


@router.post("/runs/delete")
def delete_run(body: requests.RunBody, logger: Logger) -> Document:
    """Mark a run as deleted, which hides it from searches. Nothing is deleted."""
    return _set_deleted(body, logger, "runs/delete", deleted=True)


@router.post("/runs/restore")
def restore_run(body: requests.RunBody, logger: Logger) -> Document:
    """Show a run in searches again."""
    return _set_deleted(body, logger, "runs/restore", deleted=False)


@router.post("/runs/log-metric")
def log_metric(body: requests.LogMetric, logger: Logger) -> Document:
    """Log one value of one metric."""
    run_id = parse_run_id(body.run_id, body.run_uuid)
    logger.store_metrics(run_id, [body])
    store_model_metrics(logger.database, logger.project_id, run_id, [body])
    logger.forward(run_id, "runs/log-metric", _dump_request(body))
    return {}


@router.post("/runs/log-batch")
def log_batch(body: requests.LogBatch, logger: Logger) -> Document:
    """Log metrics, params and tags of a run. Repeating the request changes nothing."""
    run_id = parse_run_id(body.run_id, body.run_uuid)
    count = len(body.metrics) + len(body.params) + len(body.tags)
    if count > requests.MAX_BATCH_ITEMS:
        raise invalid_parameter(f"{count} metrics, params and tags; a batch has at most {requests.MAX_BATCH_ITEMS}")
    if body.params:
        logger.store_params(run_id, [item.to_item() for item in body.params])
    if body.tags:
        logger.store_tags(run_id, [item.to_item() for item in body.tags])
    logger.store_metrics(run_id, body.metrics)
    store_model_metrics(logger.database, logger.project_id, run_id, body.metrics)
    logger.forward(run_id, "runs/log-batch", _dump_request(body))
    return {}


@router.post("/runs/log-parameter")
def log_parameter(body: requests.LogItem, logger: Logger) -> Document:
    """Log one param. A stored param keeps its value."""
    run_id = parse_run_id(body.run_id, body.run_uuid)
    logger.store_params(run_id, [body.to_item()])
    logger.forward(run_id, "runs/log-parameter", _dump_request(body))
    return {}


@router.post("/runs/set-tag")
def set_tag(body: requests.LogItem, logger: Logger) -> Document:
    """Set a tag."""
    run_id = parse_run_id(body.run_id, body.run_uuid)
    logger.store_tags(run_id, [body.to_item()])
    logger.forward(run_id, "runs/set-tag", _dump_request(body))
    return {}


@router.post("/runs/delete-tag")
def delete_tag(body: requests.DeleteTag, logger: Logger) -> Document:
    """Remove a tag."""
    run_id = parse_run_id(body.run_id, body.run_uuid)
    if not labels.is_client_tag(body.key):
        raise invalid_parameter(f"the tag {body.key!r} cannot be deleted")

    def remove(current: dict[str, str]) -> dict[str, str]:
        if body.key not in current:
            raise not_found(f"No tag with name: {body.key} in run with id {run_id.hex}")
        return {key: value for key, value in current.items() if key != body.key}

    open_run.relabel_run(logger.database, logger.project_id, run_id, remove, logger.actor, logger.now, logger.key)
    logger.forward(run_id, "runs/delete-tag", _dump_request(body))
    return {}


@router.post("/runs/log-inputs")
def log_inputs(body: requests.LogInputs, logger: Logger) -> Document:
    """Log datasets and models that a run reads; stored unchanged."""

    def add(current: MlflowRun) -> MlflowRun:
        datasets = _merge_documents(current.inputs.get("dataset_inputs", []), body.datasets)
        models = _merge_documents(current.inputs.get("model_inputs", []), body.models)
        return replace(current, inputs={"dataset_inputs": datasets, "model_inputs": models})

    run_id = parse_run_id(body.run_id, body.run_uuid)
    logger.change_mlflow_run(run_id, add)
    logger.forward(run_id, "runs/log-inputs", _dump_request(body))
    return {}


@router.post("/runs/outputs")
def log_outputs(body: requests.LogOutputs, logger: Logger) -> Document:
    """Log models that a run creates; stored unchanged."""
    logger.change_mlflow_run(
        parse_run_id(body.run_id, body.run_uuid),
        lambda current: replace(
            current, outputs={"model_outputs": _merge_documents(current.outputs.get("model_outputs", []), body.models)}
        ),
    )
    return {}


@router.post("/runs/log-model")
def log_model(body: requests.RunBody, logger: Logger) -> Document:
    """Accept model metadata of older clients, and ignore it; the model's files are stored."""
    with logger.database.reading() as tx:
        load_run(tx, logger.project_id, parse_run_id(body.run_id, body.run_uuid))
    return {}


@router.post("/runs/search")
def search_runs(body: requests.SearchRuns, caller: Read, context: Ctx, database: Db, artifacts: Artifacts) -> Document:
    """The matching runs of experiments, by default newest first."""
    clauses = search.parse_filter(body.filter, search.RUNS)
    orders = [*search.parse_orders(body.order_by, search.RUNS), *_NEWEST_FIRST]
    with_metrics = search.names_metrics(clauses, orders)
    with database.reading() as tx:
        ids = find_references(tx, caller.project_id, body.experiment_ids)
        scanned = mlflow_runs.list_runs_of_experiments(tx, caller.project_id, ids, MAX_SCANNED_RUNS)
        fields = {
            recorded.run.id: _list_fields(tx, recorded, with_metrics)
            for recorded in load_recorded(tx, scanned, artifacts)
            if is_visible(recorded.deleted, body.run_view_type)
        }
        matching = [run for run in scanned if run.id in fields and search.matches(clauses, fields[run.id])]
        ordered = search.sort(matching, orders, lambda run: fields[run.id])
        page, token = paginate(ordered, body.offset, body.max_results)
        return {"runs": list(responses.run_documents(tx, load_recorded(tx, page, artifacts), context)), **token}


@router.get("/artifacts/list")
def list_artifacts(
    caller: ReadOrIngest, database: Db, artifacts: Artifacts, run_id: QueriedRun, path: str = ""
) -> Document:
    """The artifacts of a run that this service stores."""
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, run_id)
        root: str = responses.run_info(load_recorded(tx, [run], artifacts)[0])["artifact_uri"]
    folder = path.strip("/")
    prefix = f"{folder}/" if folder else ""
    address = f"{root.removeprefix(SCHEME)}/{folder}"
    files = file_documents(artifacts, caller, address, prefix)
    return {"root_uri": root, "files": files if root.startswith(SCHEME) else []}


def _run_document(tx: Transaction, run: Run, context: Context, artifacts: ArtifactFolder) -> Document:
    return next(responses.run_documents(tx, load_recorded(tx, [run], artifacts), context))


def _list_fields(tx: Transaction, recorded: RecordedRun, with_metrics: bool) -> search.Fields:
    latest = observations.list_latest(tx, recorded.run.id) if with_metrics else []
    return {
        "attributes": responses.run_info(recorded),
        "tags": recorded.run.labels,
        "params": recorded.mlflow_run.params,
        "metrics": {item.metric: item.value for item in latest},
    }


def _merge_documents(current: list[Document], new: list[Document]) -> list[Document]:
    """Merge both lists without duplicates, up to a limit."""
    return [*current, *(item for item in new if item not in current)][: requests.MAX_INPUTS]


def _set_deleted(body: requests.RunBody, logger: RunLogger, path: str, *, deleted: bool) -> Document:
    run_id: UUID = parse_run_id(body.run_id, body.run_uuid)
    logger.change_mlflow_run(run_id, lambda current: replace(current, deleted=deleted))
    logger.forward(run_id, path, {})
    return {}


def _dump_request(body: requests.RunBody) -> Document:
    """The request as JSON, with NaN and the infinities as strings, and without models, which exist only here."""
    of_models: dict[str, Any] = {"models": True, "model_id": True, "metrics": {"__all__": {"model_id"}}}
    document: Document = body.model_dump(mode="json", exclude_none=True, exclude=of_models)
    return document


MAX_HISTORY = 1000
"""More values in one answer would hold up the event loop."""


@router.get("/metrics/get-history")
def get_history(
    caller: ReadOrIngest,
    database: Db,
    metric_key: Annotated[Name, Query()],
    run_id: QueriedRun,
    max_results: Annotated[int | None, Query(ge=1)] = None,
    page_token: Annotated[str | None, Query(pattern=observations.CURSOR)] = None,
) -> Document:
    """All values of a metric by step, page by page."""
    limit = min(max_results or MAX_HISTORY, MAX_HISTORY)
    after = observations.parse_cursor(page_token)
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, run_id)
        points = observations.list_observations(tx, run.id, metric=metric_key, after=after, limit=limit)
    answer: Document = {"metrics": responses.history_document(points, metric_key)}
    if len(points) == limit:
        answer["next_page_token"] = points[-1].cursor
    return answer
