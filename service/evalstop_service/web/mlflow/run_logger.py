"""Stores what a client logs for a run: metrics as observations, tags as labels, and params separately."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, NamedTuple
from uuid import UUID

from evalstop_detectors import derive_total_steps, find_total_steps
from evalstop_detectors.roles.params import EPOCH
from fastapi import Depends, Request
from msgspec.structs import replace

from evalstop_service.decisions import commands
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Message, Observations, open_run
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.store import mlflow, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.mlflow import Experiment, MlflowRun
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.store.runs import Run
from evalstop_service.web.context import Caller, Context, Ctx, Ingest, Now
from evalstop_service.web.mlflow import requests
from evalstop_service.web.mlflow.experiments import default_experiment
from evalstop_service.web.mlflow.protocol import not_found
from evalstop_service.web.mlflow.requests import CHECKPOINT, Item, MetricIn, is_uuid


class Checkpoint(NamedTuple):
    """The step of a checkpoint, and its path below the artifacts of its run. `by_epoch`: the step is an epoch."""

    step: int
    path: str
    by_epoch: bool = False


_NUMBERED = re.compile(r"(?:checkpoint|ckpt|(?:global_?)?step)[-_]?(\d{1,15})(?:\.\w+)*", re.IGNORECASE)
"""`checkpoint-500` of transformers, `global_step_500` of MLflow's autologging, `step-500.pt`."""
_LIGHTNING = re.compile(r"(?:.*[-_.])?step=(\d{1,15})(?:[-_.].*)?", re.IGNORECASE)
"""`epoch=2-step=500`, after 500 steps, whose metrics Lightning logs at step 499, as it counts these from 0."""
_EPOCH = re.compile(r"epoch_(\d{1,15})")
"""`checkpoints/epoch_2` of MLflow's autologging, which logs metrics by epoch too."""
_NOTES = re.compile(
    r"\.(?:csv|gif|html?|jpe?g|jsonl?|log|md|mp4|parquet|pdf|png|svg|tsv|txt|wav|webp|ya?ml)", re.IGNORECASE
)
"""Endings of files that people log for a step and that are no checkpoint of it, such as `step-500/samples.json`."""


def find_checkpoint(path: str) -> Checkpoint | None:
    """The checkpoint that an artifact is, or belongs to, by the names in its path; the outermost counts."""
    parts = path.split("/")
    for depth, part in enumerate(parts, 1):
        is_named = part.lower().startswith(("checkpoint", "ckpt")) and depth < len(parts)
        if not is_named and _NOTES.fullmatch(PurePosixPath(parts[-1]).suffix):
            continue
        below = "/".join(parts[:depth])
        if (numbered := _NUMBERED.fullmatch(part)) is not None:
            return Checkpoint(int(numbered[1]), below)
        if (saved := _LIGHTNING.fullmatch(part)) is not None:
            return Checkpoint(max(0, int(saved[1]) - 1), below)
        if parts[0] == "checkpoints" and (epoch := _EPOCH.fullmatch(part)) is not None:
            return Checkpoint(int(epoch[1]), below, by_epoch=True)
    return None


class RunLogger:
    """Stores what a client logs and counts what cannot be stored."""

    def __init__(self, request: Request, caller: Caller, context: Context, now: datetime) -> None:
        self.project_id, self.key, self.actor = caller.project_id, caller.key, caller.actor
        self.context, self.database, self.now = context, context.database, now
        self._committer = context.committer
        self._service_metrics: ServiceMetrics = request.app.state.service_metrics

    def finish_run(self, run_id: UUID, status: RunStatus) -> None:
        """End a run; if a tag names the decision that the trainer obeyed, the decision becomes `obeyed`."""
        with self.database.reading() as tx:
            tag = load_run(tx, self.project_id, run_id).labels.get(requests.OBEYED, "")
        obeyed = UUID(tag) if status is RunStatus.COMPLETED and is_uuid(tag) else None
        commands.finish_run(self.database, self.project_id, run_id, status, self.now, obeyed=obeyed, actor=self.actor)

    def store_tags(self, run_id: UUID, tags: list[Item]) -> None:
        """Store tags as labels, up to the limits; tags for checkpoints register them."""
        dropped = 0

        def merge(run: Run) -> Run:
            nonlocal dropped
            labels, dropped = requests.merge_tags(run.labels, tags)
            return open_run.relabel_run(run, labels)

        self._change_run(run_id, merge)
        self._count_dropped("label", dropped)
        self.register_checkpoints(run_id, tags)

    def store_params(self, run_id: UUID, params: list[Item]) -> None:
        """Store params, up to the limits."""
        dropped = 0

        def merge(current: MlflowRun) -> MlflowRun:
            nonlocal dropped
            merged, dropped = requests.merge_params(current.params, params)
            return replace(current, params=merged)

        self.change_mlflow_run(run_id, merge)
        self._count_dropped("param", dropped)
        if total_steps := find_total_steps(dict(params)):
            self._tell_total_steps(run_id, total_steps)

    def change_mlflow_run(self, run_id: UUID, change: Callable[[MlflowRun], MlflowRun]) -> None:
        """Change a run's data other than labels. Raises NotFound, and Conflict if the run was pruned."""
        with self.database.transaction() as tx:
            refuse_pruned_run(runs.lock_run(tx, self.project_id, run_id))
            mlflow.change_mlflow_run(tx, run_id, change)

    def register_checkpoints(self, run_id: UUID, tags: list[Item]) -> None:
        """Register the checkpoints that tags name."""
        for key, value in tags:
            step, uri = key.removeprefix(CHECKPOINT), requests.clean_text(value)
            if step == key or not step.isdecimal() or len(step) > 15 or not uri:
                continue
            self.register_checkpoint(run_id, int(step), uri)

    def register_checkpoint(self, run_id: UUID, step: int, uri: str) -> None:
        """Register a checkpoint. The first URI of a step stands, as the first of all logged values."""
        if len(uri) > requests.LONGEST_VALUE or step > MAX_STEP:  # truncated, it would be another URI
            self._count_dropped("checkpoint")
            return
        try:
            self._committer.submit_and_wait(Message(self.project_id, run_id, CheckpointSaved(step, uri)))
        except Conflict:
            self._count_dropped("checkpoint")

    def store_metrics(self, run_id: UUID, metrics: list[MetricIn]) -> None:
        """Store values of metrics. A stored value is never overwritten. An epoch may set the length of the run."""
        points = [point for metric in metrics if (point := metric.to_observation()) is not None]
        self._count_dropped("step", len(metrics) - len(points))
        if points:
            message = Message(self.project_id, run_id, Observations(tuple(points)), self.key.id)
            receipt = self._committer.submit_and_wait(message)
            epoch = next((point for point in points if point.metric == EPOCH), None)
            if epoch is not None and receipt.run.total_steps is None:
                with self.database.reading() as tx:
                    params = mlflow.load_mlflow_runs(tx, [run_id])[run_id].params
                if total_steps := derive_total_steps(params, epoch.value, epoch.step):
                    self._tell_total_steps(run_id, total_steps)
        else:
            with self.database.reading() as tx:
                load_run(tx, self.project_id, run_id)

    def _tell_total_steps(self, run_id: UUID, total_steps: int) -> None:
        self._committer.costs.require_room(self.key.id, self.project_id)  # clients retry a 429
        try:
            self._change_run(run_id, lambda run: replace(run, total_steps=total_steps))
        except Conflict:  # another key's run keeps its length; to refuse the param would end the training
            self._count_dropped("total_steps")

    def _change_run(self, run_id: UUID, change: Callable[[Run], Run]) -> None:
        open_run.change_run(self.database, self.project_id, run_id, change, self.actor, self.now, self.key)

    def _count_dropped(self, kind: str, count: int = 1) -> None:
        if count:
            self._service_metrics.mlflow_left_out.labels(kind).inc(count)


async def _create_logger(request: Request, caller: Ingest, context: Ctx, now: Now) -> RunLogger:
    return RunLogger(request, caller, context, now)


Logger = Annotated[RunLogger, Depends(_create_logger)]


def load_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run:
    """The project's run. Raises MlflowError."""
    run = runs.find_run(tx, project_id, run_id)
    if run is None:
        raise not_found(f"Run with id={run_id.hex} not found")
    return run


@dataclass(frozen=True)
class RecordedRun:
    """A run, its data from MLflow clients, and its experiment."""

    run: Run
    mlflow_run: MlflowRun
    experiment: Experiment

    @property
    def artifact_uri(self) -> str:
        """Where the client stores the run's artifacts."""
        return f"{self.experiment.artifact_location.rstrip('/')}/{self.run.id.hex}/artifacts"


def load_recorded(tx: Transaction, page: Sequence[Run], root: str) -> list[RecordedRun]:
    """Runs of one project with their data from MLflow clients."""
    mlflow_runs_by_id = mlflow.load_mlflow_runs(tx, [run.id for run in page])
    ids = {item.experiment_id for item in mlflow_runs_by_id.values() if item.experiment_id is not None}
    stored = mlflow.load_experiments(tx, ids)
    recorded = []
    for run in page:
        mlflow_run = mlflow_runs_by_id[run.id]
        own_id = mlflow_run.experiment_id
        experiment = default_experiment(run.project_id, root) if own_id is None else stored[own_id]
        recorded.append(RecordedRun(run, mlflow_run, experiment))
    return recorded
