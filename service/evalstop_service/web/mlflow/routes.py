"""The verbs: what a client of MLflow may ask, each ending where everything else that trainers say ends."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request

from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict
from evalstop_service.ingest import Arrival, Points, Saved, open_run
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import observations, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run, RunFilter
from evalstop_service.web.api.schemas import Name
from evalstop_service.web.context import Commit, Context, Db, Now
from evalstop_service.web.mlflow import errors, experiments, labels, search
from evalstop_service.web.mlflow import responses as answers
from evalstop_service.web.mlflow.authentication import Either, Ingesting, Reading, Verb
from evalstop_service.web.mlflow.errors import Failure, invalid, missing
from evalstop_service.web.mlflow.forwarding import Said, Tee
from evalstop_service.web.mlflow.labels import Item
from evalstop_service.web.mlflow.requests import (
    MOST_TOGETHER,
    CreateRun,
    DeleteTag,
    ItemIn,
    LogBatch,
    LogItem,
    LogMetric,
    MetricIn,
    RunWord,
    SearchRuns,
    UpdateRun,
    is_id,
)

CHECKPOINT = "evalstop.checkpoint."
"""A tag of this name and a step tells where the checkpoint of the step is."""

LOOKED_THROUGH = 1000
"""Runs that one search looks at; the token of its answer goes on behind them."""

HISTORY_AT_A_TIME = 10_000

_NO_ARTIFACTS = (
    "EvalStop keeps no artifacts: log metrics, params and tags here, and save files where your trainer saves its "
    "checkpoints. A tag evalstop.checkpoint.STEP with the place of a checkpoint makes it known"
)

router = APIRouter(prefix="/api/2.0/mlflow", route_class=Verb)


def create(context: Context, service_metrics: ServiceMetrics, tee: Tee | None) -> FastAPI:
    """The application that is to be mounted at `/mlflow`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.context, app.state.service_metrics, app.state.tee = context, service_metrics, tee
    errors.install(app)
    app.include_router(experiments.router)
    app.include_router(router)
    app.include_router(_elsewhere)
    return app


class Log:
    """What a client says of a run: taken in here, counted where it cannot be, and passed on."""

    def __init__(self, request: Request, caller: Ingesting, committer: Commit, database: Db, now: Now) -> None:
        self.project_id, self.database, self.now = caller.project_id, database, now
        self._committer = committer
        self._service_metrics: ServiceMetrics = request.app.state.service_metrics
        self._tee: Tee | None = request.app.state.tee

    def run_id(self, word: RunWord) -> UUID:
        """Of which run this is said."""
        return run_id_of(word.run_id or word.run_uuid)

    def items(self, run_id: UUID, params: list[Item], tags: list[Item]) -> None:
        """Keep params and tags as labels, as far as there is room; those that tell of checkpoints are taken as such."""
        left_out = 0

        def relabelled(known: dict[str, str]) -> dict[str, str]:
            nonlocal left_out
            found, left_out = labels.labelled(known, params, tags)
            return found

        open_run.relabel_run(self.database, self.project_id, run_id, relabelled, self.now)
        self._leave_out("label", left_out)
        self.checkpoints(run_id, tags)

    def checkpoints(self, run_id: UUID, tags: list[Item]) -> None:
        """Take in where checkpoints are, as far as tags tell."""
        for key, value in tags:
            step, place = key.removeprefix(CHECKPOINT), labels.clean(value)
            if step == key or not step.isdecimal() or len(step) > 15 or not place:
                continue
            if len(place) > labels.LONGEST_VALUE:  # cut, it would be the place of something else
                self._leave_out("checkpoint")
            else:
                self._saved(run_id, int(step), place)

    def metrics(self, run_id: UUID, metrics: list[MetricIn]) -> None:
        """Store what was measured. What contradicts the record is passed over: the first value stands."""
        points = [point for metric in metrics if (point := metric.point()) is not None]
        self._leave_out("step", len(metrics) - len(points))
        if points:
            self._committer.take(Arrival(self.project_id, run_id, Points(tuple(points))))
        else:
            with self.database.reading() as tx:
                found(tx, self.project_id, run_id)

    def pass_on(self, run_id: UUID, verb: str | None, body: dict[str, Any]) -> None:
        """Have it sent to the MLflow server behind this one, if there is one."""
        if self._tee is not None:
            self._tee.offer(Said(self.project_id, run_id, verb, msgspec.json.encode(body)))

    def _saved(self, run_id: UUID, step: int, uri: str) -> None:
        try:
            self._committer.take(Arrival(self.project_id, run_id, Saved(step, uri)))
        except Conflict:  # the place that was told first stands, as with everything that is logged
            self._leave_out("checkpoint")

    def _leave_out(self, what: str, count: int = 1) -> None:
        if count:
            self._service_metrics.mlflow_left_out.labels(what).inc(count)


Logging = Annotated[Log, Depends(Log)]


@router.post("/runs/create")
def create_run(body: CreateRun, log: Logging) -> dict[str, Any]:
    """Open a run: always a new one, as in MLflow."""
    with log.database.reading() as tx:
        experiment = experiments.found(tx, log.project_id, body.experiment_id)
    tags = [tag.item() for tag in body.tags]
    said_name = body.run_name or dict(tags).get(labels.RUN_NAME, "")
    name = labels.clean(said_name).strip() or "run"
    tags += [Item(labels.RUN_NAME, name), *([Item(labels.USER, body.user_id)] if body.user_id else [])]
    prefix = {} if experiment is None else {labels.EXPERIMENT: experiment.name}
    found, _ = labels.labelled({}, tags=tags)
    full_name = name if experiment is None else f"{experiment.name}/{name}"
    request = open_run.OpenRequest(full_name, recognise=True, labels=found | prefix)
    run = open_run.create_run(log.database, log.project_id, request, log.now)
    log.checkpoints(run.id, tags)
    log.pass_on(run.id, None, {})
    with log.database.reading() as tx:
        return {"run": next(answers.run_documents(tx, [run], log.now))}


@router.get("/runs/get")
def get_run(
    caller: Either, database: Db, now: Now, run_id: str | None = None, run_uuid: str | None = None
) -> dict[str, Any]:
    """A run with its newest values; its tags tell whether it should stop."""
    with database.reading() as tx:
        run = found(tx, caller.project_id, run_id_of(run_id or run_uuid))
        return {"run": next(answers.run_documents(tx, [run], now))}


@router.post("/runs/update")
def update_run(body: UpdateRun, log: Logging) -> dict[str, Any]:
    """Take note that a run has ended or goes on, or is called otherwise."""
    run_id = log.run_id(body)
    match body.status:
        case "FINISHED" | "FAILED" | "KILLED":
            ended = "completed" if body.status == "FINISHED" else "failed"
            commands.finish_run(log.database, log.project_id, run_id, ended, log.now)
        case "RUNNING":
            open_run.reopen_run(log.database, log.project_id, run_id, log.now)
        case None | "SCHEDULED" | "UNFINISHED":
            pass
        case _:
            raise invalid(f"status {body.status!r:.100}: one of RUNNING, SCHEDULED, FINISHED, FAILED, KILLED")
    if body.run_name:
        log.items(run_id, [], [Item(labels.RUN_NAME, body.run_name)])
    log.pass_on(run_id, "runs/update", _as_sent(body))
    with log.database.reading() as tx:
        return {"run_info": answers.run_info(tx, found(tx, log.project_id, run_id))}


@router.post("/runs/delete")
def delete_run(body: RunWord, log: Logging) -> dict[str, Any]:
    """Mark a run as deleted, which hides it from searches. What is on record stays there."""
    return _staged(body, log, "deleted", "runs/delete")


@router.post("/runs/restore")
def restore_run(body: RunWord, log: Logging) -> dict[str, Any]:
    """Show a run in searches again."""
    return _staged(body, log, "active", "runs/restore")


@router.post("/runs/log-metric")
def log_metric(body: LogMetric, log: Logging) -> dict[str, Any]:
    """One value of one metric."""
    run_id = log.run_id(body)
    log.metrics(run_id, [body])
    log.pass_on(run_id, "runs/log-metric", _as_sent(body))
    return {}


@router.post("/runs/log-batch")
def log_batch(body: LogBatch, log: Logging) -> dict[str, Any]:
    """Metrics, params and tags of a run. Sent again, it changes nothing."""
    run_id = log.run_id(body)
    count = len(body.metrics) + len(body.params) + len(body.tags)
    if count > MOST_TOGETHER:
        raise invalid(f"{count} metrics, params and tags; a batch may hold {MOST_TOGETHER} in all")
    if body.params or body.tags:
        log.items(run_id, _items(body.params), _items(body.tags))
    log.metrics(run_id, body.metrics)
    log.pass_on(run_id, "runs/log-batch", _as_sent(body))
    return {}


@router.post("/runs/log-parameter")
def log_parameter(body: LogItem, log: Logging) -> dict[str, Any]:
    """One param. One that is on record with another value keeps it."""
    run_id = log.run_id(body)
    log.items(run_id, [body.item()], [])
    log.pass_on(run_id, "runs/log-parameter", _as_sent(body))
    return {}


@router.post("/runs/set-tag")
def set_tag(body: LogItem, log: Logging) -> dict[str, Any]:
    """One tag."""
    run_id = log.run_id(body)
    log.items(run_id, [], [body.item()])
    log.pass_on(run_id, "runs/set-tag", _as_sent(body))
    return {}


@router.post("/runs/delete-tag")
def delete_tag(body: DeleteTag, log: Logging) -> dict[str, Any]:
    """Remove a tag."""
    run_id = log.run_id(body)
    if not labels.is_for_clients(body.key):
        raise invalid(f"{body.key!r} is no tag that could be deleted")
    open_run.relabel_run(
        log.database,
        log.project_id,
        run_id,
        lambda known: {key: value for key, value in known.items() if key != body.key},
        log.now,
    )
    log.pass_on(run_id, "runs/delete-tag", _as_sent(body))
    return {}


@router.post("/runs/search")
def search_runs(body: SearchRuns, caller: Reading, database: Db, now: Now) -> dict[str, Any]:
    """Runs, newest first, as many as are wanted of those that are looked through; the token goes on behind them."""
    search.newest_first(body.order_by)
    fits = search.selects(search.clauses(body.filter))
    before = None if body.page_token is None else run_id_of(body.page_token)
    with database.reading() as tx:
        names = {
            experiment.name if (experiment := experiments.found(tx, caller.project_id, one)) else None
            for one in body.experiment_ids
        }
        looked_at = runs.list_runs(tx, caller.project_id, RunFilter(before=before), LOOKED_THROUGH)
        near = [
            run
            for run in looked_at
            if (not names or run.labels.get(labels.EXPERIMENT) in names)
            and _is_shown(run.labels.get(labels.LIFECYCLE, "active"), body.run_view_type)
        ]
        chosen = list(islice(filter(fits, answers.run_documents(tx, near, now)), body.max_results))
    if len(chosen) == body.max_results:
        return {"runs": chosen, "next_page_token": chosen[-1]["info"]["run_id"]}
    if len(looked_at) == LOOKED_THROUGH:
        return {"runs": chosen, "next_page_token": looked_at[-1].id.hex}
    return {"runs": chosen}


@router.get("/metrics/get-history")
def get_history(
    caller: Reading,
    database: Db,
    metric_key: Annotated[Name, Query()],
    run_id: str | None = None,
    run_uuid: str | None = None,
    max_results: Annotated[int | None, Query(ge=1)] = None,
    page_token: Annotated[str | None, Query(pattern=r"^[0-9]{1,16}\.[0-9]{1,9}$")] = None,
) -> dict[str, Any]:
    """All values of a metric by ascending step, so many at a time."""
    limit = min(max_results or HISTORY_AT_A_TIME, HISTORY_AT_A_TIME)
    after = None
    if page_token is not None:
        step, superseded_by = map(int, page_token.split("."))
        after = (step, superseded_by)
    with database.reading() as tx:
        run = found(tx, caller.project_id, run_id_of(run_id or run_uuid))
        points = observations.list_observations(tx, run.id, metric=metric_key, after=after, limit=limit)
    answer: dict[str, Any] = {"metrics": answers.history_document(points, metric_key)}
    if len(points) == limit:
        answer["next_page_token"] = f"{points[-1].step}.{points[-1].superseded_by}"
    return answer


@router.get("/artifacts/list")
def list_artifacts(
    caller: Either, database: Db, run_id: str | None = None, run_uuid: str | None = None
) -> dict[str, Any]:
    """The artifacts of a run: there are none."""
    with database.reading() as tx:
        run = found(tx, caller.project_id, run_id_of(run_id or run_uuid))
        return {"root_uri": answers.run_info(tx, run)["artifact_uri"]}


_elsewhere = APIRouter()
_ANY = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@_elsewhere.api_route("/api/2.0/mlflow-artifacts/{path:path}", methods=_ANY)
def artifacts(path: str) -> None:
    """Files: not kept, and said so."""
    raise Failure(501, "NOT_IMPLEMENTED", _NO_ARTIFACTS)


@_elsewhere.api_route("/{path:path}", methods=_ANY)
def unknown(path: str, request: Request) -> None:
    """What MLflow knows and this service does not: models, datasets, traces."""
    message = (
        f"EvalStop does not speak this part of MLflow: {request.method} /{path}. It takes experiments, runs, metrics, "
        "params and tags, and keeps no artifacts, models, datasets or traces"
    )
    raise Failure(404, "ENDPOINT_NOT_FOUND", message)


def found(tx: Transaction, project_id: UUID, run_id: UUID) -> Run:
    """The project's run. Raises Failure."""
    run = runs.find_run(tx, project_id, run_id)
    if run is None:
        raise missing(f"there is no run {run_id.hex} in this project")
    return run


def run_id_of(text: str | None) -> UUID:
    """The id of a run, as it was given to a client. Raises Failure."""
    if not text:
        raise invalid("run_id is missing")
    if not is_id(text):
        raise missing(f"there is no run {text!r:.100} in this project")
    return UUID(text)


def _staged(body: RunWord, log: Log, stage: str, verb: str) -> dict[str, Any]:
    run_id = log.run_id(body)
    open_run.relabel_run(log.database, log.project_id, run_id, lambda known: known | {labels.LIFECYCLE: stage}, log.now)
    log.pass_on(run_id, verb, {})
    return {}


def _is_shown(stage: str, view: str) -> bool:
    return view == "ALL" or (stage == "deleted") == (view == "DELETED_ONLY")


def _items(items: list[ItemIn]) -> list[Item]:
    return [item.item() for item in items]


def _as_sent(word: RunWord) -> dict[str, Any]:
    """The request as the next server may have it: NaN and the infinities as texts."""
    document: dict[str, Any] = word.model_dump(mode="json", exclude_none=True)
    return document
