"""Runs and experiments in MLflow's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store import decisions, experiments, observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.experiments import Experiment
from evalstop_service.store.observations import StoredObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.api.schemas import encode_number
from evalstop_service.web.mlflow import labels
from evalstop_service.web.mlflow.labels import Item
from evalstop_service.web.mlflow.requests import Document, to_milliseconds

DEFAULT_ID, DEFAULT_NAME = "0", "Default"
"""The experiment of runs without one, including those that do not use MLflow."""

_STATUS = {
    RunStatus.RUNNING: "RUNNING",
    RunStatus.COMPLETED: "FINISHED",
    RunStatus.STOPPED: "KILLED",
    RunStatus.FAILED: "FAILED",
    RunStatus.LOST: "FAILED",
}


def experiment_document(experiment: Experiment | None) -> Document:
    """An experiment; None is the default one."""
    own_id = DEFAULT_ID if experiment is None else experiment.id.hex
    document: Document = {
        "experiment_id": own_id,
        "name": DEFAULT_NAME if experiment is None else experiment.name,
        "artifact_location": f"mlflow-artifacts:/{own_id}",
        "lifecycle_stage": "active",
        "tags": [],
    }
    if experiment is not None:
        document |= dict.fromkeys(("creation_time", "last_update_time"), to_milliseconds(experiment.created_at))
    return document


def run_documents(tx: Transaction, page: Sequence[Run], now: datetime) -> Iterator[Document]:
    """Runs with the newest value of each metric; verdict and best checkpoint are tags."""
    on_record = decisions.load_decisions(tx, [run.id for run in page])
    for run in page:
        decision = on_record.get(run.id)
        should_stop = decision is not None and decision.attempt == run.attempt and decision.stops(now)
        tags = [*labels.read_tags(run.labels), *_verdict_tags(run, should_stop)]
        updated = to_milliseconds(run.updated_at)
        metrics = [
            {"key": item.metric, "value": encode_number(item.value), "step": item.step, "timestamp": updated}
            for item in observations.list_latest(tx, run.id)
        ]
        data = {
            "metrics": metrics,
            "params": _item_documents(labels.read_params(run.labels)),
            "tags": _item_documents(tags),
        }
        yield {"info": run_info(tx, run), "data": data, "inputs": {}, "outputs": {}}


def run_info(tx: Transaction, run: Run) -> Document:
    """The identity and status of a run."""
    experiment = find_experiment_id(tx, run)
    info = {
        "run_id": run.id.hex,
        "run_uuid": run.id.hex,
        "run_name": run.labels.get(labels.RUN_NAME, run.name),
        "experiment_id": experiment,
        "user_id": run.labels.get(labels.USER, ""),
        "status": _STATUS[run.status],
        "start_time": to_milliseconds(run.created_at),
        "artifact_uri": f"mlflow-artifacts:/{experiment}/{run.id.hex}/artifacts",
        "lifecycle_stage": run.labels.get(labels.LIFECYCLE, "active"),
    }
    return info if run.ended_at is None else info | {"end_time": to_milliseconds(run.ended_at)}


def find_experiment_id(tx: Transaction, run: Run) -> str:
    """The id of a run's experiment."""
    name = run.labels.get(labels.EXPERIMENT)
    experiment = None if name is None else experiments.find_experiment_by_name(tx, run.project_id, name)
    return DEFAULT_ID if experiment is None else experiment.id.hex


def history_document(points: Iterable[StoredObservation], metric: str) -> list[Document]:
    """Values of a metric without superseded ones."""
    return [
        {
            "key": metric,
            "value": encode_number(point.value),
            "step": point.step,
            "timestamp": to_milliseconds(point.observed_at or point.received_at),
        }
        for point in points
        if not point.superseded_by
    ]


def _verdict_tags(run: Run, should_stop: bool) -> list[Item]:
    tags = {
        "evalstop.should_stop": "true" if should_stop else "false",
        "evalstop.verdict": run.verdict.verdict,
        "evalstop.reason": run.verdict.reason,
    }
    if run.best_checkpoint is not None:
        tags["evalstop.best_checkpoint"] = run.best_checkpoint.uri
    return [Item(*pair) for pair in tags.items()]


def _item_documents(items: Iterable[Item]) -> list[dict[str, str]]:
    return [item._asdict() for item in items]
