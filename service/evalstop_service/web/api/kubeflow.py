"""Kubeflow Trainer's progress reports, which transformers' `KubeflowCallback` posts at most every few seconds.

A report holds the latest value of every metric, whenever it was logged, and the current step. So a value counts as new
only when it differs from the last recorded one, and it is stored at the step of the report, which is later than the
step at which it was logged.
"""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from evalstop_service.domain.fields import Name
from evalstop_service.ingest import Message, Observations, open_run
from evalstop_service.store import observations, runs
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.schemas import MAX_STEP, Answer
from evalstop_service.web.context import Commit, Db, Ingest, Now

router = APIRouter(prefix="/kubeflow", tags=["observations"], route_class=JsonRoute)

STEP, TOTAL_STEPS = "current_step", "total_steps"


class ReportedMetric(BaseModel):
    """A metric and its latest value, as a string. Other fields are ignored, as in the whole report."""

    name: Name = Field(description="the name of the series", examples=["eval_loss"])
    value: Annotated[str, Field(max_length=100)] = Field(description="a number, as a string", examples=["0.61"])


class TrainerStatus(BaseModel):
    """How far training has come."""

    metrics: Annotated[list[ReportedMetric], Field(max_length=1000)] = Field(
        [], description="the latest value of each metric"
    )


class ProgressIn(BaseModel):
    """A report, of which only the metrics are used."""

    trainerStatus: TrainerStatus = Field(description="status reported by the trainer")  # noqa: N815 - Kubeflow's name


class ProgressOut(Answer):
    """The result of a report."""

    run_id: str = Field(description="the run of this name")
    accepted: int = Field(description="values that were new")
    should_stop: bool = Field(description="the callback ignores it: a receiver must end the job")


@router.post("/{name}")
def post_kubeflow_report(
    name: Annotated[Name, Path(description="name of the run", examples=["ppo-7b-seed3"])],
    body: ProgressIn,
    caller: Ingest,
    committer: Commit,
    database: Db,
    now: Now,
) -> ProgressOut:
    """Store a report of the run with this name; its first report opens the run."""
    reported = {
        item.name: number for item in body.trainerStatus.metrics if (number := _parse_number(item.value)) is not None
    }
    total = reported.pop(TOTAL_STEPS, None)
    total_steps = int(total) if total is not None and 1 <= total <= MAX_STEP else None
    with database.reading() as tx:
        run = runs.find_run_by_name(tx, caller.project_id, name)
    if run is None:  # a late report does not reopen a run that has ended
        terms = open_run.OpenRequest(name, recognise=True, total_steps=total_steps, actor=caller.actor, key=caller.key)
        run, _ = open_run.open_run(database, caller.project_id, terms, now)
    elif total_steps not in (None, run.total_steps):
        committer.costs.require_room(caller.key.id, caller.project_id)
        open_run.tell_total_steps(database, caller.project_id, run.id, total_steps, caller.actor, now, caller.key)
    points = _select_new(run, reported, database)
    accepted, decision = 0, None
    if points:
        receipt = committer.submit_and_wait(Message(caller.project_id, run.id, Observations(points), caller.key.id))
        accepted, decision = receipt.accepted, receipt.decision
    should_stop = decision is not None and decision.should_stop
    return ProgressOut(run_id=str(run.id), accepted=accepted, should_stop=should_stop)


def _select_new(run: Run, reported: dict[str, float], database: Database) -> tuple[PostedObservation, ...]:
    """The values that differ from the recorded ones, at the report's step; a run's last report has no step."""
    with database.reading() as tx:
        latest = {item.metric: item for item in observations.list_latest(tx, run.id)}
    reported_step = reported.pop(STEP, None)
    if reported_step is not None and 0 <= reported_step <= MAX_STEP:
        step = int(reported_step)
    else:
        step = 0 if run.last_step is None else run.last_step + 1
    return tuple(
        PostedObservation(metric, step, value)
        for metric, value in reported.items()
        if metric not in latest or (not _is_same(latest[metric].value, value) and latest[metric].step < step)
    )


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
