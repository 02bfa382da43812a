"""Routes of runs and of the values of their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query
from msgspec.structs import replace

from evalstop_service.decisions.commands import tell_trainer_of
from evalstop_service.domain.fields import Name
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.ingest import open_run
from evalstop_service.store import decisions, mlflow, observations, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.mlflow import STATUSES, MlflowRun
from evalstop_service.store.projects import get_project
from evalstop_service.store.runs import Run
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.schemas import encode_number
from evalstop_service.web.context import Context, Ctx, Db, Read, ReadOrIngest
from evalstop_service.web.limits import SEARCH_COST
from evalstop_service.web.mlflow import requests
from evalstop_service.web.mlflow.experiments import Root, find_references, load_experiment, pair_documents
from evalstop_service.web.mlflow.protocol import API, invalid_parameter
from evalstop_service.web.mlflow.requests import Document, to_milliseconds
from evalstop_service.web.mlflow.run_logger import Logger, RecordedRun, load_recorded, load_run

router = APIRouter(prefix=f"{API}/mlflow", route_class=JsonRoute)


@router.post("/runs/create")
def create_run(body: requests.CreateRun, logger: Logger, root: Root) -> Document:
    """Create a run; always a new one, as in MLflow."""
    tags = requests.list_items(body.tags)
    sent_name = body.run_name or dict(tags).get(requests.RUN_NAME, "")
    name = requests.clean_text(sent_name).strip() or "run"
    tags += [(requests.RUN_NAME, name), *([(requests.USER, body.user_id)] if body.user_id else [])]
    run_labels, _ = requests.merge_tags({}, tags)
    with logger.database.transaction() as tx:
        experiment = load_experiment(tx, logger.project_id, body.experiment_id, root)
        if experiment.reference is not None:
            name = f"{experiment.name}/{name}"
            run_labels |= {requests.EXPERIMENT: experiment.name}
        request = open_run.OpenRequest(name, recognise=True, labels=run_labels, actor=logger.actor, key=logger.key)
        run = open_run.create_run(tx, get_project(tx, logger.project_id), request, logger.now)
        mlflow.add_mlflow_run(tx, MlflowRun(run.id, experiment.reference, start_time=body.start_time))
    logger.register_checkpoints(run.id, tags)
    with logger.database.reading() as tx:
        return {"run": next(_run_documents(tx, [run], logger.context, root))}


@router.get("/runs/get")
def get_run(caller: ReadOrIngest, context: Ctx, database: Db, root: Root, run_id: UUID) -> Document:
    """A run with its newest values; the tag `evalstop.should_stop` says whether to stop."""
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, run_id)
    if not {"ingest", "admin"}.isdisjoint(caller.key.scopes):  # a trainer's, which ends when it reads the tag
        tell_trainer_of(database, context.clock, run)
    with database.reading() as tx:
        return {"run": next(_run_documents(tx, [run], context, root))}


@router.post("/runs/update")
def update_run(body: requests.UpdateRun, logger: Logger, root: Root) -> Document:
    """Change the status or the name of a run."""
    match body.status:
        case "FINISHED" | "FAILED" | "KILLED":
            logger.finish_run(body.run_id, RunStatus.COMPLETED if body.status == "FINISHED" else RunStatus.FAILED)
            if body.end_time is not None:
                logger.change_mlflow_run(body.run_id, lambda current: replace(current, end_time=body.end_time))
        case "RUNNING":
            open_run.reopen_run(logger.database, logger.project_id, body.run_id, logger.actor, logger.now)
        case None | "SCHEDULED" | "UNFINISHED":
            pass
        case _:
            raise invalid_parameter(f"status {body.status!r:.100}: one of RUNNING, SCHEDULED, FINISHED, FAILED, KILLED")
    if body.run_name:
        logger.store_tags(body.run_id, [(requests.RUN_NAME, body.run_name)])
    with logger.database.reading() as tx:
        run = load_run(tx, logger.project_id, body.run_id)
        return {"run_info": _run_info(load_recorded(tx, [run], root)[0])}


@router.post("/runs/log-metric")
def log_metric(body: requests.LogMetric, logger: Logger) -> Document:
    """Log one value of one metric."""
    logger.store_metrics(body.run_id, [body])
    return {}


@router.post("/runs/log-batch")
def log_batch(body: requests.LogBatch, logger: Logger) -> Document:
    """Log metrics, params and tags of a run. Repeating the request changes nothing."""
    count = len(body.metrics) + len(body.params) + len(body.tags)
    if count > requests.MAX_BATCH_ITEMS:
        raise invalid_parameter(f"{count} metrics, params and tags; a batch has at most {requests.MAX_BATCH_ITEMS}")
    if body.params:
        logger.store_params(body.run_id, requests.list_items(body.params))
    if body.tags:
        logger.store_tags(body.run_id, requests.list_items(body.tags))
    logger.store_metrics(body.run_id, body.metrics)
    return {}


@router.post("/runs/log-parameter")
def log_parameter(body: requests.LogItem, logger: Logger) -> Document:
    """Log one param. A stored param keeps its value."""
    logger.store_params(body.run_id, requests.list_items([body]))
    return {}


@router.post("/runs/set-tag")
def set_tag(body: requests.LogItem, logger: Logger) -> Document:
    """Set a tag."""
    logger.store_tags(body.run_id, requests.list_items([body]))
    return {}


@router.post("/runs/log-inputs")
def log_inputs(body: requests.RunBody, logger: Logger) -> Document:
    """Accept the datasets that a run reads, which are not kept."""
    with logger.database.reading() as tx:
        load_run(tx, logger.project_id, body.run_id)
    return {}


@router.post("/runs/search")
def search_runs(body: requests.SearchRuns, caller: Read, context: Ctx, root: Root) -> Document:
    """The matching runs of experiments, newest first."""
    clauses = requests.parse_filter(body.filter)
    context.limits.spend_costly(SEARCH_COST)
    with context.database.reading() as tx:
        experiment_ids = find_references(tx, caller.project_id, body.experiment_ids)
        ids = mlflow.search_runs(tx, caller.project_id, experiment_ids, clauses, body.offset, body.limit + 1)
        loaded = runs.load_runs(tx, ids[: body.limit])
        page = [loaded[run_id] for run_id in ids[: body.limit]]
        documents = list(_run_documents(tx, page, context, root))
    return body.make_page("runs", documents, is_last=len(ids) <= body.limit)


def _run_documents(tx: Transaction, page: Sequence[Run], context: Context, root: str) -> Iterator[Document]:
    """Runs with the newest value of each metric; verdict and best checkpoint are tags."""
    on_record = decisions.load_decisions(tx, [run.id for run in page])
    for recorded in load_recorded(tx, page, root):
        run = recorded.run
        updated = to_milliseconds(run.updated_at)
        metrics = [
            {"key": item.metric, "value": encode_number(item.value), "step": item.step, "timestamp": updated}
            for item in observations.list_latest(tx, run)
        ]
        data = {
            "metrics": metrics,
            "params": pair_documents(recorded.mlflow_run.params),
            "tags": pair_documents(run.labels | _verdict_tags(run, on_record.get(run.id), context)),
        }
        yield {"info": _run_info(recorded), "data": data, "inputs": {}, "outputs": {}}


def _run_info(recorded: RecordedRun) -> Document:
    """The identity and status of a run."""
    run, mlflow_run = recorded.run, recorded.mlflow_run
    start_time = mlflow_run.start_time
    info = {
        "run_id": run.id.hex,
        "run_uuid": run.id.hex,
        "run_name": run.labels.get(requests.RUN_NAME, run.name),
        "experiment_id": str(recorded.experiment.number),
        "user_id": run.labels.get(requests.USER, mlflow.NO_USER),
        "status": STATUSES[run.status],
        "start_time": to_milliseconds(run.created_at) if start_time is None else start_time,
        "artifact_uri": recorded.artifact_uri,
        "lifecycle_stage": "active",
    }
    if run.ended_at is None:
        return info
    return info | {"end_time": to_milliseconds(run.ended_at) if mlflow_run.end_time is None else mlflow_run.end_time}


def _verdict_tags(run: Run, decision: Decision | None, context: Context) -> dict[str, str]:
    stops = decision is not None and decision.should_stop
    tags = {
        "evalstop.mode": run.mode,
        "evalstop.should_stop": "true" if stops else "false",
        "evalstop.verdict": run.verdict.verdict,
        "evalstop.reason": run.verdict.reason,
    }
    if decision is not None:
        tags["evalstop.decision"] = str(decision.id)
        tags["evalstop.decision_state"] = decision.state
        tags["evalstop.decision_reason"] = decision.state_reason
    if (url := context.locate_run(run.id)) is not None:
        tags["evalstop.url"] = url
    if run.total_steps is not None:
        tags["evalstop.total_steps"] = str(run.total_steps)
    if run.best_checkpoint is not None:
        tags["evalstop.best_checkpoint"] = run.best_checkpoint.uri
    return tags


MAX_HISTORY = 1000
"""More values in one answer would hold up the event loop."""


@router.get("/metrics/get-history")
def get_history(
    caller: ReadOrIngest,
    database: Db,
    metric_key: Annotated[Name, Query()],
    run_id: UUID,
    max_results: Annotated[int | None, Query(ge=1)] = None,
    page_token: Annotated[int | None, Query(ge=0, le=observations.MAX_STEP)] = None,
) -> Document:
    """All values of a metric by step, page by page."""
    limit = min(max_results or MAX_HISTORY, MAX_HISTORY)
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, run_id)
        points = observations.list_observations(tx, run.id, metric_key, after=page_token, limit=limit)
    values = [
        {
            "key": metric_key,
            "value": encode_number(point.value),
            "step": point.step,
            "timestamp": to_milliseconds(point.observed_at or point.received_at),
        }
        for point in points
    ]
    answer: Document = {"metrics": values}
    if len(points) == limit:
        answer["next_page_token"] = str(points[-1].step)
    return answer
