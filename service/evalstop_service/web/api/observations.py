"""Observations: posted in batches, counted once, read back by metric."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response
from pydantic import Field

from evalstop_service.ingest import MOST_UNWATCHED, Message, Observations
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store import observations
from evalstop_service.web.api.observation_results import MOST_CONFLICTS, receipt_json
from evalstop_service.web.api.reading.batch import UNREADABLE, BatchIn, decode_batch
from evalstop_service.web.api.reading.json_body import JsonRoute, SentBody
from evalstop_service.web.api.runs import load_run
from evalstop_service.web.api.schemas import (
    Answer,
    BestCheckpointOut,
    DecisionStateOut,
    Name,
    Page,
    RunId,
    Stored,
    Time,
    VerdictOut,
)
from evalstop_service.web.context import Commit, Db, Ingest, Read, Tell
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

router = APIRouter(prefix="/runs/{run_id}/observations", tags=["observations"], route_class=JsonRoute)


class ConflictOut(Answer):
    """A point that is on record with another value, which stands."""

    metric: str = Field(description="the name of the series")
    step: int = Field(description="the training step")
    stored_value: Stored = Field(description="what is on record, and stands")
    sent_value: Stored = Field(description="what was sent, and is not stored")


class CheckpointPlaceOut(Answer):
    """Where the model of a step was saved."""

    step: int = Field(description="the training step that it holds")
    uri: str = Field(description="where the trainer said it is")


class AskedOut(Answer):
    """A paired evaluation that is asked for: of the best checkpoint and of the model of now."""

    id: UUID = Field(description="to answer it by")
    step: int = Field(description="the evaluation is of the first checkpoint registered from this step on")
    best_checkpoint: CheckpointPlaceOut = Field(description="what the current checkpoint is compared with")
    multiplier: int = Field(description="so many times the prompts of a usual eval")
    seed: int = Field(description="from which both draw their prompts")
    deadline_at: Time = Field(description="until then it can be answered")


class ReceiptOut(Answer):
    """What became of the batch, and where the run stands after it. All of it is durable."""

    accepted: int = Field(description="points that were new")
    duplicates: int = Field(description="points that were on record with the same value")
    conflict_count: int = Field(description="points that are on record with another value, which stands")
    conflicts: list[ConflictOut] = Field(description=f"the first {MOST_CONFLICTS} of them")
    verdict: VerdictOut = Field(description="of the run, with these points weighed")
    should_stop: bool = Field(description="true once a stop was requested: save a checkpoint and end")
    decision: DecisionStateOut | None = Field(description="on the present attempt: why it is stopped, or not yet")
    best_checkpoint: BestCheckpointOut | None = Field(description="null until a checkpoint has an eval")
    guessed: list[str] = Field(
        description="metrics whose role or direction was guessed from their names: they never stop the run until"
        " somebody confirms them"
    )
    missing: dict[str, str] = Field(description="the roles of watched metrics that have no value yet")
    unwatched: list[str] = Field(
        description=f"metrics with values and without a role, the first {MOST_UNWATCHED}; listed while any is missing, "
        "or none is the eval"
    )
    status: RunStatus = Field(description="of the run: of one that has ended, observations are kept and stop nothing")
    eval_request: AskedOut | None = Field(
        description="the paired evaluation that is awaited, of runs that were opened with `evaluates`"
    )


class ObservationOut(Answer):
    """An observation as it is on record."""

    metric: str = Field(description="the name of the series")
    step: int = Field(description="the training step at which it was measured")
    value: Stored = Field(description="in the unit of the metric")
    stderr: float | None = Field(description="the standard error of the value; null: not said")
    time: Time | None = Field(description="when it was measured; null: not said")
    attempt: int = Field(description="the attempt that reported it")
    superseded_by: int | None = Field(description="the attempt that took its place; null while it counts")
    received_at: Time = Field(description="when it was stored")


class ObservationPage(Page):
    """Observations of one metric by ascending step."""

    items: list[ObservationOut] = Field(description="by ascending step, superseded ones included")


@router.post("", response_model=ReceiptOut)
def post_observations(
    run_id: RunId, body: BatchIn, sent: SentBody, caller: Ingest, committer: Commit, clock: Tell
) -> Response:
    """Store a batch and hear the verdict. A batch with any malformed point is refused whole."""
    # `body` has said what is wrong with a batch, if anything. What is stored is read by msgspec, as the endpoint in
    # front of this route does it.
    try:
        points = decode_batch(sent)
    except UNREADABLE as error:
        raise Problem(422, ProblemKind.INVALID_REQUEST, f"{error}; nothing of it was stored") from error
    receipt = committer.submit_and_wait(Message(caller.project_id, run_id, Observations(points), caller.key.id))
    return Response(receipt_json(receipt, clock()), media_type="application/json")


@router.get("")
def list_observations(
    run_id: RunId,
    metric: Annotated[Name, Query(description="the name of the series")],
    caller: Read,
    database: Db,
    cursor: Annotated[
        str | None,
        Query(
            pattern=r"^[0-9]{1,16}\.[0-9]{1,9}$",
            description="`next_cursor` of the page before; by default the first page",
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="the most items of a page")] = 1000,
) -> ObservationPage:
    """One metric's observations by ascending step, superseded ones too."""
    after = _parse_cursor(cursor)
    with database.reading() as tx:
        load_run(tx, caller.project_id, run_id)
        items = observations.list_observations(tx, run_id, metric=metric, after=after, limit=limit)
    last = items[-1] if len(items) == limit else None
    return ObservationPage(
        items=[
            ObservationOut.model_validate(
                vars(item) | {"time": item.observed_at, "superseded_by": item.superseded_by or None}
            )
            for item in items
        ],
        next_cursor=f"{last.step}.{last.superseded_by}" if last else None,
    )


def _parse_cursor(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    step, superseded_by = map(int, text.split("."))
    return step, superseded_by
