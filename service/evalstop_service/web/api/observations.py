"""Routes of observations: post batches, list the observations of a metric, or read it downsampled."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response
from pydantic import Field

from evalstop_service.decisions.commands import tell_trainer
from evalstop_service.domain.fields import Name
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.ingest import MOST_UNWATCHED, Message, Observations
from evalstop_service.store import observations, runs, series
from evalstop_service.web.api.observation_results import MOST_CONFLICTS, receipt_json
from evalstop_service.web.api.reading.batch import UNREADABLE, BatchIn, decode_batch
from evalstop_service.web.api.reading.json_body import JsonRoute, SentBody
from evalstop_service.web.api.schemas import (
    MAX_STEP,
    Answer,
    BestCheckpointOut,
    DecisionStateOut,
    Page,
    RunId,
    Stored,
    Time,
    VerdictOut,
)
from evalstop_service.web.context import Commit, Db, Ingest, Read, Tell
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

router = APIRouter(prefix="/runs/{run_id}", tags=["observations"], route_class=JsonRoute)


class ConflictOut(Answer):
    """An observation that was already stored with another value, which stands."""

    metric: str = Field(description="the name of the series")
    step: int = Field(description="the training step")
    stored_value: Stored = Field(description="the stored value, which stands")
    sent_value: Stored = Field(description="the sent value, which is not stored")


class CheckpointPlaceOut(Answer):
    """Where a checkpoint is stored."""

    step: int = Field(description="the training step that it holds")
    uri: str = Field(description="the URI that the trainer reported")


class AskedOut(Answer):
    """A requested paired evaluation, of the best checkpoint and of the current one."""

    id: UUID = Field(description="id of the request")
    step: int = Field(description="evaluate the first checkpoint registered at or after this step")
    best_checkpoint: CheckpointPlaceOut = Field(description="the checkpoint to compare with")
    multiplier: int = Field(description="number of prompts, as a multiple of a usual eval")
    seed: int = Field(description="both evaluations draw their prompts with this seed")
    deadline_at: Time = Field(description="it can be answered until then")


class ReceiptOut(Answer):
    """The result of the batch, and the resulting state of the run. Everything is durable."""

    accepted: int = Field(description="number of new observations")
    duplicates: int = Field(description="observations that were already stored with the same value")
    conflict_count: int = Field(description="observations that were already stored with another value, which stands")
    conflicts: list[ConflictOut] = Field(description=f"the first {MOST_CONFLICTS} conflicts")
    verdict: VerdictOut = Field(description="the run's verdict, including these observations")
    should_stop: bool = Field(description="true once a stop was requested: save a checkpoint and end")
    decision: DecisionStateOut | None = Field(
        description="the decision on the current attempt: why it is stopped, or not yet"
    )
    best_checkpoint: BestCheckpointOut | None = Field(description="null until a checkpoint has an eval")
    guessed: list[str] = Field(
        description="metrics whose role or direction was guessed from their names: they cannot stop the run until"
        " they are confirmed"
    )
    missing: dict[str, str] = Field(description="the roles of watched metrics that have no value yet")
    unwatched: list[str] = Field(
        description=f"metrics with values but without a role, the first {MOST_UNWATCHED}; listed while any is missing, "
        "or none is the eval"
    )
    status: RunStatus = Field(
        description="the run's status; observations of a run that has ended are stored and stop nothing"
    )
    eval_request: AskedOut | None = Field(
        description="the paired evaluation that the service waits for, for runs opened with `evaluates`"
    )


class ObservationOut(Answer):
    """A stored observation."""

    metric: str = Field(description="the name of the series")
    step: int = Field(description="the training step at which it was measured")
    value: Stored = Field(description="in the unit of the metric")
    stderr: float | None = Field(description="the standard error of the value; null: not reported")
    time: Time | None = Field(description="when it was measured; null: not reported")
    attempt: int = Field(description="the attempt that reported it")
    superseded_by: int | None = Field(description="the attempt that superseded it; null while it counts")
    received_at: Time = Field(description="when it was stored")


@router.post("/observations", response_model=ReceiptOut)
def post_observations(
    run_id: RunId, body: BatchIn, sent: SentBody, caller: Ingest, committer: Commit, database: Db, clock: Tell
) -> Response:
    """Store a batch and return the verdict. A batch with a malformed observation is refused as a whole."""
    # `body` reports what is wrong with a batch. What is stored is decoded by msgspec, as in the endpoint in front of
    # this route.
    try:
        points = decode_batch(sent)
    except UNREADABLE as error:
        raise Problem(422, ProblemKind.INVALID_REQUEST, f"{error}; nothing was stored") from error
    receipt = committer.submit_and_wait(Message(caller.project_id, run_id, Observations(points), caller.key.id))
    should_stop = tell_trainer(database, clock, receipt.decision)
    return Response(receipt_json(receipt, should_stop, clock()), media_type="application/json")


@router.get("/observations")
def list_observations(
    run_id: RunId,
    metric: Annotated[Name, Query(description="the name of the series")],
    caller: Read,
    database: Db,
    cursor: Annotated[
        str | None,
        Query(pattern=observations.CURSOR, description="`next_cursor` of the previous page; default: the first page"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="maximum number of items per page")] = 1000,
) -> Page[ObservationOut]:
    """One metric's observations by ascending step, including superseded ones."""
    after = observations.parse_cursor(cursor)
    with database.reading() as tx:
        runs.load_run(tx, caller.project_id, run_id)
        items = observations.list_observations(tx, run_id, metric=metric, after=after, limit=limit)
    return Page[ObservationOut](
        items=[
            ObservationOut.model_validate(
                vars(item) | {"time": item.observed_at, "superseded_by": item.superseded_by or None}
            )
            for item in items
        ],
        next_cursor=items[-1].cursor if len(items) == limit else None,
    )


MOST_BUCKETS = 2000


class BucketOut(Answer):
    """Adjacent observations of a metric, without superseded ones."""

    first_step: int = Field(description="step of its first observation")
    last_step: int = Field(description="step of its last observation")
    count: int = Field(description="number of observations, including those that are not finite")
    lowest: float | None = Field(description="the lowest finite value; null: none")
    highest: float | None = Field(description="the highest finite value; null: none")
    last: Stored = Field(description="the value at `last_step`")
    nan_count: int = Field(description="number of NaN values")
    infinite_count: int = Field(description="number of infinite values")


class SeriesOut(Answer):
    """One metric of a run by step."""

    metric: str = Field(description="the name of the series")
    buckets: list[BucketOut] = Field(description="by ascending step")


@router.get("/series")
def get_series(
    run_id: RunId,
    metric: Annotated[Name, Query(description="the name of the series")],
    caller: Read,
    database: Db,
    buckets: Annotated[int, Query(ge=1, le=MOST_BUCKETS, description="maximum number of buckets")] = 500,
    first_step: Annotated[int, Query(alias="from", ge=0, le=MAX_STEP, description="the first step")] = 0,
    last_step: Annotated[int, Query(alias="to", ge=0, le=MAX_STEP, description="the last step")] = MAX_STEP,
) -> SeriesOut:
    """The lowest, highest and last value of each bucket; all buckets have about the same number of observations."""
    with database.reading() as tx:
        runs.load_run(tx, caller.project_id, run_id)
    series.catch_up_summaries(database, run_id, metric)
    with database.reading() as tx:
        items = series.load_buckets(tx, run_id, metric, first_step, last_step, buckets)
    return SeriesOut(metric=metric, buckets=[BucketOut.model_validate(item) for item in items])
