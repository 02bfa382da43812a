"""Routes of MLflow's tracking API for runs and metrics."""

from __future__ import annotations

from itertools import islice
from typing import Annotated
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request

from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Message, Observations, open_run
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store import observations, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run, RunFilter
from evalstop_service.web.api.schemas import Name
from evalstop_service.web.context import Commit, Context, Db, Now
from evalstop_service.web.mlflow import errors, experiments, labels, search
from evalstop_service.web.mlflow import responses as answers
from evalstop_service.web.mlflow.authentication import Ingest, MlflowRoute, Read, ReadOrIngest
from evalstop_service.web.mlflow.errors import MlflowError, invalid_parameter, not_found
from evalstop_service.web.mlflow.forwarding import ForwardedRequest, Forwarder
from evalstop_service.web.mlflow.labels import Item
from evalstop_service.web.mlflow.requests import (
    MAX_BATCH_ITEMS,
    CreateRun,
    DeleteTag,
    Document,
    ItemIn,
    LogBatch,
    LogItem,
    LogMetric,
    MetricIn,
    RunBody,
    SearchRuns,
    UpdateRun,
    is_uuid,
)

CHECKPOINT = "evalstop.checkpoint."
"""A tag `evalstop.checkpoint.STEP` has the URI of the checkpoint of that step."""

MAX_SCANNED_RUNS = 1000
"""Runs that one search scans; the page token continues after them."""

MAX_HISTORY = 10_000

_NO_ARTIFACTS = (
    "EvalStop does not store artifacts. Log metrics, params and tags here and save files elsewhere; the tag "
    "evalstop.checkpoint.STEP registers the URI of a checkpoint"
)

router = APIRouter(prefix="/api/2.0/mlflow", route_class=MlflowRoute)


def create_app(context: Context, service_metrics: ServiceMetrics, forwarder: Forwarder | None) -> FastAPI:
    """The app to mount at `/mlflow`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.context, app.state.service_metrics, app.state.forwarder = context, service_metrics, forwarder
    errors.install_error_handlers(app)
    app.include_router(experiments.router)
    app.include_router(router)
    app.include_router(_unsupported)
    return app


class RunLogger:
    """Stores what a client logs, counts what cannot be stored, and forwards the request."""

    def __init__(self, request: Request, caller: Ingest, committer: Commit, database: Db, now: Now) -> None:
        self.project_id, self.database, self.now = caller.project_id, database, now
        self._committer = committer
        self._service_metrics: ServiceMetrics = request.app.state.service_metrics
        self._forwarder: Forwarder | None = request.app.state.forwarder

    def store_to_items(self, run_id: UUID, params: list[Item], tags: list[Item]) -> None:
        """Store params and tags as labels, up to the limits; tags with checkpoints register those."""
        dropped = 0

        def merge(known: dict[str, str]) -> dict[str, str]:
            nonlocal dropped
            merged, dropped = labels.merge_labels(known, params, tags)
            return merged

        open_run.relabel_run(self.database, self.project_id, run_id, merge, self.now)
        self._count_dropped("label", dropped)
        self.register_checkpoints(run_id, tags)

    def register_checkpoints(self, run_id: UUID, tags: list[Item]) -> None:
        """Register the checkpoints that tags name."""
        for key, value in tags:
            step, uri = key.removeprefix(CHECKPOINT), labels.clean_text(value)
            if step == key or not step.isdecimal() or len(step) > 15 or not uri:
                continue
            if len(uri) > labels.LONGEST_VALUE:  # cut off, it would be another URI
                self._count_dropped("checkpoint")
            else:
                self._register_checkpoint(run_id, int(step), uri)

    def store_metrics(self, run_id: UUID, metrics: list[MetricIn]) -> None:
        """Store values of metrics. A stored value is never overwritten."""
        points = [point for metric in metrics if (point := metric.to_observation()) is not None]
        self._count_dropped("step", len(metrics) - len(points))
        if points:
            self._committer.submit_and_wait(Message(self.project_id, run_id, Observations(tuple(points))))
        else:
            with self.database.reading() as tx:
                load_run(tx, self.project_id, run_id)

    def forward(self, run_id: UUID, path: str | None, body: Document) -> None:
        """Forward the request to the other MLflow server, if one is configured."""
        if self._forwarder is not None:
            self._forwarder.enqueue(ForwardedRequest(self.project_id, run_id, path, msgspec.json.encode(body)))

    def _register_checkpoint(self, run_id: UUID, step: int, uri: str) -> None:
        try:
            self._committer.submit_and_wait(Message(self.project_id, run_id, CheckpointSaved(step, uri)))
        except Conflict:  # the first URI of a step is kept, as with all that is logged
            self._count_dropped("checkpoint")

    def _count_dropped(self, what: str, count: int = 1) -> None:
        if count:
            self._service_metrics.mlflow_left_out.labels(what).inc(count)


Logger = Annotated[RunLogger, Depends(RunLogger)]


@router.post("/runs/create")
def create_run(body: CreateRun, logger: Logger) -> Document:
    """Create a run, always a new one, as in MLflow."""
    with logger.database.reading() as tx:
        experiment = experiments.load_experiment(tx, logger.project_id, body.experiment_id)
    tags = [tag.to_item() for tag in body.tags]
    sent_name = body.run_name or dict(tags).get(labels.RUN_NAME, "")
    name = labels.clean_text(sent_name).strip() or "run"
    tags += [Item(labels.RUN_NAME, name), *([Item(labels.USER, body.user_id)] if body.user_id else [])]
    prefix = {} if experiment is None else {labels.EXPERIMENT: experiment.name}
    run_labels, _ = labels.merge_labels({}, tags=tags)
    full_name = name if experiment is None else f"{experiment.name}/{name}"
    request = open_run.OpenRequest(full_name, recognise=True, labels=run_labels | prefix)
    run = open_run.create_run(logger.database, logger.project_id, request, logger.now)
    logger.register_checkpoints(run.id, tags)
    logger.forward(run.id, None, {})
    with logger.database.reading() as tx:
        return {"run": next(answers.run_documents(tx, [run], logger.now))}


@router.get("/runs/get")
def get_run(
    caller: ReadOrIngest, database: Db, now: Now, run_id: str | None = None, run_uuid: str | None = None
) -> Document:
    """A run with its newest values; the tag `evalstop.should_stop` says whether to stop."""
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, parse_run_id(run_id or run_uuid))
        return {"run": next(answers.run_documents(tx, [run], now))}


@router.post("/runs/update")
def update_run(body: UpdateRun, logger: Logger) -> Document:
    """Change the status or the name of a run."""
    run_id = parse_run_id(body.run_id or body.run_uuid)
    match body.status:
        case "FINISHED" | "FAILED" | "KILLED":
            ended = RunStatus.COMPLETED if body.status == "FINISHED" else RunStatus.FAILED
            commands.finish_run(logger.database, logger.project_id, run_id, ended, logger.now)
        case "RUNNING":
            open_run.reopen_run(logger.database, logger.project_id, run_id, logger.now)
        case None | "SCHEDULED" | "UNFINISHED":
            pass
        case _:
            raise invalid_parameter(f"status {body.status!r:.100}: one of RUNNING, SCHEDULED, FINISHED, FAILED, KILLED")
    if body.run_name:
        logger.store_to_items(run_id, [], [Item(labels.RUN_NAME, body.run_name)])
    logger.forward(run_id, "runs/update", _dump_request(body))
    with logger.database.reading() as tx:
        return {"run_info": answers.run_info(tx, load_run(tx, logger.project_id, run_id))}


@router.post("/runs/delete")
def delete_run(body: RunBody, logger: Logger) -> Document:
    """Mark a run as deleted, which hides it from searches. Nothing is deleted."""
    return _set_lifecycle(body, logger, "deleted", "runs/delete")


@router.post("/runs/restore")
def restore_run(body: RunBody, logger: Logger) -> Document:
    """Show a run in searches again."""
    return _set_lifecycle(body, logger, "active", "runs/restore")


@router.post("/runs/log-metric")
def log_metric(body: LogMetric, logger: Logger) -> Document:
    """One value of one metric."""
    run_id = parse_run_id(body.run_id or body.run_uuid)
    logger.store_metrics(run_id, [body])
    logger.forward(run_id, "runs/log-metric", _dump_request(body))
    return {}


@router.post("/runs/log-batch")
def log_batch(body: LogBatch, logger: Logger) -> Document:
    """Metrics, params and tags of a run. Sending them again changes nothing."""
    run_id = parse_run_id(body.run_id or body.run_uuid)
    count = len(body.metrics) + len(body.params) + len(body.tags)
    if count > MAX_BATCH_ITEMS:
        raise invalid_parameter(f"{count} metrics, params and tags; a batch has at most {MAX_BATCH_ITEMS}")
    if body.params or body.tags:
        logger.store_to_items(run_id, _to_items(body.params), _to_items(body.tags))
    logger.store_metrics(run_id, body.metrics)
    logger.forward(run_id, "runs/log-batch", _dump_request(body))
    return {}


@router.post("/runs/log-parameter")
def log_parameter(body: LogItem, logger: Logger) -> Document:
    """One param. A stored param keeps its value."""
    run_id = parse_run_id(body.run_id or body.run_uuid)
    logger.store_to_items(run_id, [body.to_item()], [])
    logger.forward(run_id, "runs/log-parameter", _dump_request(body))
    return {}


@router.post("/runs/set-tag")
def set_tag(body: LogItem, logger: Logger) -> Document:
    """One tag."""
    run_id = parse_run_id(body.run_id or body.run_uuid)
    logger.store_to_items(run_id, [], [body.to_item()])
    logger.forward(run_id, "runs/set-tag", _dump_request(body))
    return {}


@router.post("/runs/delete-tag")
def delete_tag(body: DeleteTag, logger: Logger) -> Document:
    """Remove a tag."""
    run_id = parse_run_id(body.run_id or body.run_uuid)
    if not labels.is_client_tag(body.key):
        raise invalid_parameter(f"the tag {body.key!r} cannot be deleted")
    open_run.relabel_run(
        logger.database,
        logger.project_id,
        run_id,
        lambda known: {key: value for key, value in known.items() if key != body.key},
        logger.now,
    )
    logger.forward(run_id, "runs/delete-tag", _dump_request(body))
    return {}


@router.post("/runs/search")
def search_runs(body: SearchRuns, caller: Read, database: Db, now: Now) -> Document:
    """The newest runs that match, of those that one search scans; the page token continues after them."""
    search.check_order(body.order_by)
    matches = search.build_predicate(search.parse_filter(body.filter))
    before = None if body.page_token is None else parse_run_id(body.page_token)
    with database.reading() as tx:
        names = {
            experiment.name
            if (experiment := experiments.load_experiment(tx, caller.project_id, experiment_id))
            else None
            for experiment_id in body.experiment_ids
        }
        scanned = runs.list_runs(tx, caller.project_id, RunFilter(before=before), MAX_SCANNED_RUNS)
        visible = [
            run
            for run in scanned
            if (not names or run.labels.get(labels.EXPERIMENT) in names)
            and _is_visible(run.labels.get(labels.LIFECYCLE, "active"), body.run_view_type)
        ]
        chosen = list(islice(filter(matches, answers.run_documents(tx, visible, now)), body.max_results))
    if len(chosen) == body.max_results:
        return {"runs": chosen, "next_page_token": chosen[-1]["info"]["run_id"]}
    if len(scanned) == MAX_SCANNED_RUNS:
        return {"runs": chosen, "next_page_token": scanned[-1].id.hex}
    return {"runs": chosen}


@router.get("/metrics/get-history")
def get_history(
    caller: Read,
    database: Db,
    metric_key: Annotated[Name, Query()],
    run_id: str | None = None,
    run_uuid: str | None = None,
    max_results: Annotated[int | None, Query(ge=1)] = None,
    page_token: Annotated[str | None, Query(pattern=r"^[0-9]{1,16}\.[0-9]{1,9}$")] = None,
) -> Document:
    """All values of a metric by step, page by page."""
    limit = min(max_results or MAX_HISTORY, MAX_HISTORY)
    after = None
    if page_token is not None:
        step, superseded_by = map(int, page_token.split("."))
        after = (step, superseded_by)
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, parse_run_id(run_id or run_uuid))
        points = observations.list_observations(tx, run.id, metric=metric_key, after=after, limit=limit)
    answer: Document = {"metrics": answers.history_document(points, metric_key)}
    if len(points) == limit:
        answer["next_page_token"] = f"{points[-1].step}.{points[-1].superseded_by}"
    return answer


@router.get("/artifacts/list")
def list_artifacts(
    caller: ReadOrIngest, database: Db, run_id: str | None = None, run_uuid: str | None = None
) -> Document:
    """The artifacts of a run; always empty."""
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, parse_run_id(run_id or run_uuid))
        return {"root_uri": answers.run_info(tx, run)["artifact_uri"]}


_unsupported = APIRouter()
_ANY = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@_unsupported.api_route("/api/2.0/mlflow-artifacts/{path:path}", methods=_ANY)
def refuse_artifacts(path: str) -> None:
    """Answer that artifacts are not supported."""
    raise MlflowError(501, "NOT_IMPLEMENTED", _NO_ARTIFACTS)


@_unsupported.api_route("/{path:path}", methods=_ANY)
def refuse_unsupported(path: str, request: Request) -> None:
    """Answer that models, datasets and traces are not supported."""
    message = (
        f"EvalStop does not support {request.method} /{path}. It has experiments, runs, metrics, params and tags, "
        "but no artifacts, models, datasets or traces"
    )
    raise MlflowError(404, "ENDPOINT_NOT_FOUND", message)


def load_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run:
    """The project's run. Raises MlflowError."""
    run = runs.find_run(tx, project_id, run_id)
    if run is None:
        raise not_found(f"run {run_id.hex} does not exist in this project")
    return run


def parse_run_id(text: str | None) -> UUID:
    """The id of a run as clients send it. Raises MlflowError."""
    if not text:
        raise invalid_parameter("run_id is missing")
    if not is_uuid(text):
        raise not_found(f"run {text!r:.100} does not exist in this project")
    return UUID(text)


def _set_lifecycle(body: RunBody, logger: RunLogger, stage: str, path: str) -> Document:
    run_id = parse_run_id(body.run_id or body.run_uuid)
    open_run.relabel_run(
        logger.database, logger.project_id, run_id, lambda known: known | {labels.LIFECYCLE: stage}, logger.now
    )
    logger.forward(run_id, path, {})
    return {}


def _is_visible(stage: str, view: str) -> bool:
    return view == "ALL" or (stage == "deleted") == (view == "DELETED_ONLY")


def _to_items(items: list[ItemIn]) -> list[Item]:
    return [item.to_item() for item in items]


def _dump_request(body: RunBody) -> Document:
    """The request as JSON, with NaN and the infinities as strings."""
    document: Document = body.model_dump(mode="json", exclude_none=True)
    return document
