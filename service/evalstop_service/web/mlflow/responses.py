"""Runs and experiments in MLflow's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID, uuid5

from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store import decisions, experiments, mlflow_runs, observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.experiments import DEFAULT_NAME, DEFAULT_NUMBER, Experiment
from evalstop_service.store.mlflow_runs import MlflowRun
from evalstop_service.store.observations import StoredObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.api.schemas import encode_number
from evalstop_service.web.context import Context
from evalstop_service.web.mlflow import labels
from evalstop_service.web.mlflow.artifact_folder import ArtifactFolder
from evalstop_service.web.mlflow.requests import Document, to_milliseconds

_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)

STATUSES = {
    RunStatus.RUNNING: "RUNNING",
    RunStatus.PARKED: "SCHEDULED",
    RunStatus.COMPLETED: "FINISHED",
    RunStatus.STOPPED: "KILLED",
    RunStatus.FAILED: "FAILED",
    RunStatus.LOST: "FAILED",
}
"""MLflow's term for each status of a run."""


@dataclass(frozen=True)
class RecordedRun:
    """A run, its data from MLflow clients, and its experiment."""

    run: Run
    mlflow_run: MlflowRun
    experiment: Experiment

    @property
    def deleted(self) -> bool:
        """Whether the run or its experiment is marked as deleted."""
        return self.mlflow_run.deleted or self.experiment.deleted


def is_visible(deleted: bool, view: str) -> bool:
    """Whether a search includes an item, by its deletion mark."""
    return view == "ALL" or deleted == (view == "DELETED_ONLY")


def default_experiment(project_id: UUID, artifacts: ArtifactFolder) -> Experiment:
    """The default experiment of a project, if it was never changed."""
    return Experiment(
        id=uuid5(project_id, DEFAULT_NAME),
        project_id=project_id,
        number=DEFAULT_NUMBER,
        name=DEFAULT_NAME,
        artifact_location=artifacts.locate(str(DEFAULT_NUMBER)),
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
        "tags": _pair_documents(experiment.tags),
        "creation_time": to_milliseconds(experiment.created_at),
        "last_update_time": to_milliseconds(experiment.updated_at),
    }


def load_recorded(tx: Transaction, page: Sequence[Run], artifacts: ArtifactFolder) -> list[RecordedRun]:
    """Runs of one project with their data from MLflow clients."""
    mlflow_runs_by_id = mlflow_runs.load_mlflow_runs(tx, [run.id for run in page])
    ids = {item.experiment_id for item in mlflow_runs_by_id.values() if item.experiment_id is not None}
    stored = experiments.load_experiments(tx, ids)
    recorded = []
    for run in page:
        own_id = mlflow_runs_by_id[run.id].experiment_id
        experiment = default_experiment(run.project_id, artifacts) if own_id is None else stored[own_id]
        recorded.append(RecordedRun(run, mlflow_runs_by_id[run.id], experiment))
    return recorded


def run_documents(tx: Transaction, page: Sequence[RecordedRun], context: Context) -> Iterator[Document]:
    """Runs with the newest value of each metric; verdict and best checkpoint are tags."""
    on_record = decisions.load_decisions(tx, [recorded.run.id for recorded in page], skip_unreadable=True)
    for recorded in page:
        run = recorded.run
        decision = on_record.get(run.id)
        updated = to_milliseconds(run.updated_at)
        metrics = [
            {"key": item.metric, "value": encode_number(item.value), "step": item.step, "timestamp": updated}
            for item in observations.list_latest(tx, run.id)
        ]
        data = {
            "metrics": metrics,
            "params": _pair_documents(recorded.mlflow_run.params),
            "tags": _pair_documents(run.labels | _verdict_tags(run, decision, context)),
        }
        yield {
            "info": run_info(recorded),
            "data": data,
            "inputs": recorded.mlflow_run.inputs,
            "outputs": recorded.mlflow_run.outputs,
        }


def run_info(recorded: RecordedRun) -> Document:
    """The identity and status of a run."""
    run, mlflow_run = recorded.run, recorded.mlflow_run
    start_time = mlflow_run.start_time
    info = {
        "run_id": run.id.hex,
        "run_uuid": run.id.hex,
        "run_name": run.labels.get(labels.RUN_NAME, run.name),
        "experiment_id": str(recorded.experiment.number),
        "user_id": run.labels.get(labels.USER, "unknown"),
        "status": STATUSES[run.status],
        "start_time": to_milliseconds(run.created_at) if start_time is None else start_time,
        "artifact_uri": f"{recorded.experiment.artifact_location.rstrip('/')}/{run.id.hex}/artifacts",
        "lifecycle_stage": "deleted" if recorded.deleted else "active",
    }
    if run.ended_at is None:
        return info
    return info | {"end_time": to_milliseconds(run.ended_at) if mlflow_run.end_time is None else mlflow_run.end_time}


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


def _verdict_tags(run: Run, decision: Decision | None, context: Context) -> dict[str, str]:
    stops = decision is not None and decision.stops(context.clock())
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


def _pair_documents(pairs: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in pairs.items()]
