"""Routes of observations: post those of one run or of many, list those of a metric.

An observation that is posted is declared by `ObservationIn`; every way to post some answers with the same receipt.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from fastapi import Query, Request, Response
from pydantic import AfterValidator, BeforeValidator, Field

from evalstop_service.decisions.commands import offer_exploit, tell_trainer
from evalstop_service.domain.decision_lifecycle import Exploit
from evalstop_service.domain.fields import Body, Name
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import Overloaded, ServiceError
from evalstop_service.ingest import MOST_UNWATCHED, Message, Observations, Receipt, ValueConflict
from evalstop_service.store import observations, runs
from evalstop_service.store.observations import MAX_STEP, PostedObservation, StoredObservation
from evalstop_service.store.run_details import Checkpoint, EvalRequest
from evalstop_service.web import problems
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.schemas import (
    EXPLOIT,
    Answer,
    BestCheckpointOut,
    DecisionStateOut,
    ExploitOut,
    Measured,
    Page,
    RunId,
    ShouldStop,
    Step,
    Stored,
    Time,
    VerdictOut,
    answers,
    encode_number,
)
from evalstop_service.web.context import Commit, Ctx, Db, Ingest, Read, Tell
from evalstop_service.web.limits import in_thread

router = create_router("observations")

MAX_POINTS, MOST_RUNS = 10_000, 1000
"""The most observations and runs of one request."""

MOST_CONFLICTS = 100

PATH_OF_MANY = "/observations"


class ObservationIn(Body):
    """One value of one metric at one step."""

    metric: Name = Field(description="the name of the series", examples=["eval"])
    step: Step = Field(description="the training step at which it was measured", examples=[120])
    value: Measured = Field(description="in the unit of the metric", examples=[0.31])
    stderr: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="the standard error of the value, in its unit", examples=[0.02]
    )
    time: Time | None = Field(None, description="when it was measured")


def _few_enough(points: Any) -> Any:
    # Check the number first: a million observations can have a million errors.
    if isinstance(points, list) and len(points) > MAX_POINTS:
        raise ValueError(f"{len(points)} observations; a batch may have 1 to {MAX_POINTS}")
    return points


class BatchIn(Body):
    """Observations in any order; repeats are harmless."""

    observations: Annotated[
        list[ObservationIn], Field(min_length=1, max_length=MAX_POINTS), BeforeValidator(_few_enough)
    ] = Field(description="at most 10,000, of any metrics and steps")

    def to_content(self) -> Observations:
        """The observations to commit."""
        return Observations(
            tuple(
                [
                    PostedObservation(point.metric, point.step, point.value, point.stderr, point.time)
                    for point in self.observations
                ]
            )
        )


class BatchOfRunIn(BatchIn):
    """Observations of one of many runs."""

    observations: Annotated[list[ObservationIn], Field(min_length=1)] = Field(description="of any metrics and steps")
    run_id: Annotated[UUID, Field(strict=False)] = Field(description="the run of the observations")


def _few_enough_in_all(batches: Any) -> Any:
    if isinstance(batches, list):
        lists = [batch.get("observations") for batch in batches if isinstance(batch, dict)]
        count = sum(len(points) for points in lists if isinstance(points, list))
        if count > MAX_POINTS:
            raise ValueError(f"{count} observations; a request may have 1 to {MAX_POINTS}")
    return batches


def _check_different(batches: list[BatchOfRunIn]) -> list[BatchOfRunIn]:
    if len({batch.run_id for batch in batches}) < len(batches):
        raise ValueError("a run occurs twice; send all its observations in one list")
    return batches


class BatchesIn(Body):
    """Observations of many runs, each run once."""

    runs: Annotated[
        list[BatchOfRunIn],
        Field(min_length=1, max_length=MOST_RUNS, fail_fast=True),
        BeforeValidator(_few_enough_in_all),
        AfterValidator(_check_different),
    ] = Field(description="at most 1,000 runs, with at most 10,000 observations in all")


class ConflictOut(Answer):
    """An observation that was already stored with another value, which stands."""

    metric: str = Field(description="the name of the series")
    step: int = Field(description="the training step")
    stored_value: Stored = Field(description="the stored value, which stands")
    sent_value: Stored = Field(description="the sent value, which is not stored")


@answers(Checkpoint, "step uri")
class CheckpointPlaceOut(Answer):
    """Where a checkpoint is stored."""


@answers(EvalRequest, "id step multiplier deadline_at")
class AskedOut(Answer):
    """A requested paired evaluation, of the best checkpoint and of the current one."""

    best_checkpoint: CheckpointPlaceOut = Field(description="the checkpoint to compare with")
    seed: int = Field(description="both evaluations draw their prompts with this seed")


class ReceiptOut(Answer):
    """The result of the batch, and the resulting state of the run. Everything is durable."""

    accepted: int = Field(description="number of new observations")
    duplicates: int = Field(description="observations that were already stored with the same value")
    conflict_count: int = Field(description="observations that were already stored with another value, which stands")
    conflicts: list[ConflictOut] = Field(description=f"the first {MOST_CONFLICTS} conflicts")
    verdict: VerdictOut = Field(description="the run's verdict, including these observations")
    should_stop: ShouldStop
    decision: DecisionStateOut | None = Field(
        description="the decision on the current attempt: why it is stopped, or not yet"
    )
    exploit: ExploitOut | None = Field(description=EXPLOIT)
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


class ReceiptOfRunOut(ReceiptOut):
    """The result of the observations of one of many runs."""

    run_id: UUID = Field(description="the run of the observations")


class RefusedRunOut(Answer):
    """A run whose observations were refused: nothing of it was stored."""

    run_id: UUID = Field(description="the run of the observations")
    code: str = Field(description="kind of problem, for programs")
    title: str = Field(description="kind of problem, for people")
    detail: str = Field(description="what is wrong, and what to do about it")


class ReceiptsOut(Answer):
    """The results of the observations of many runs. Everything is durable."""

    runs: list[ReceiptOfRunOut] = Field(description="the runs whose observations are stored")
    refused: list[RefusedRunOut] = Field(description="the runs whose observations were refused")


@router.post("/runs/{run_id}/observations", response_model=ReceiptOut)
def post_observations(
    run_id: RunId, body: BatchIn, caller: Ingest, committer: Commit, database: Db, clock: Tell
) -> Response:
    """Store a batch and return the verdict. A batch with a malformed observation is refused as a whole."""
    receipt = committer.submit_and_wait(Message(caller.project_id, run_id, body.to_content(), caller.key.id))
    should_stop = tell_trainer(database, clock, receipt.decision)
    exploit = offer_exploit(database, clock, receipt.run)
    return Response(receipt_json(receipt, should_stop, clock(), exploit), media_type="application/json")


@router.post(PATH_OF_MANY, response_model=ReceiptsOut)
async def post_observations_of_runs(
    request: Request, body: BatchesIn, caller: Ingest, committer: Commit, context: Ctx, clock: Tell
) -> Response:
    """Store observations of many runs and return their verdicts. A body with a malformed observation is refused as a
    whole; a run that does not exist, or is not to be posted to, is refused by itself.

    The body may be compressed: `Content-Encoding: gzip` or `zstd`.
    """
    messages = [Message(caller.project_id, batch.run_id, batch.to_content(), caller.key.id) for batch in body.runs]
    answers = await asyncio.gather(*map(committer.submit, messages), return_exceptions=True)
    receipts: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for message, answer in zip(messages, answers, strict=True):
        run = {"run_id": message.run_id}
        if isinstance(answer, Receipt):
            decision = answer.decision
            should_stop = decision is not None and await in_thread(tell_trainer)(context.database, clock, decision)
            exploit = answer.run.exploit and await in_thread(offer_exploit)(context.database, clock, answer.run)
            receipts.append(run | _describe_receipt(answer, should_stop, clock(), exploit))
        elif isinstance(answer, ServiceError) and not isinstance(answer, Overloaded):
            problems.count_refusal(request, answer)
            problem = problems.problem_of(answer)
            refused.append(run | {"code": problem.kind.code, "title": problem.title, "detail": problem.detail})
        else:  # the client sends all of it again, and what was stored counts as duplicates
            raise answer
    return Response(_encode({"runs": receipts, "refused": refused}), media_type="application/json")


_encode = msgspec.json.Encoder().encode


def receipt_json(receipt: Receipt, should_stop: bool, now: datetime, exploit: Exploit | None = None) -> bytes:
    """The result of a batch and the resulting state of the run, as JSON; `should_stop`, `exploit`: as handed over."""
    return _encode(_describe_receipt(receipt, should_stop, now, exploit))


_DECISION_FIELDS = ("id", "action", "state", "state_reason", "guard_kinds")


def _describe_receipt(receipt: Receipt, should_stop: bool, now: datetime, exploit: Exploit | None) -> dict[str, Any]:
    run, decision, request = receipt.run, receipt.decision, receipt.eval_request
    return {
        "accepted": receipt.accepted,
        "duplicates": receipt.duplicates,
        "conflict_count": len(receipt.conflicts),
        "conflicts": [_describe_conflict(conflict) for conflict in receipt.conflicts[:MOST_CONFLICTS]],
        "verdict": run.verdict.for_json,
        "should_stop": should_stop,
        "decision": decision and {name: getattr(decision, name) for name in _DECISION_FIELDS},
        "exploit": exploit,
        "best_checkpoint": run.best_checkpoint,
        "guessed": run.recognition.guessed if run.recognition is not None else [],
        "missing": receipt.missing,
        "unwatched": receipt.unwatched,
        "status": run.status,
        "eval_request": _describe_request(request) if request is not None and request.is_open(now) else None,
    }


def _describe_conflict(conflict: ValueConflict) -> dict[str, Any]:
    return {
        "metric": conflict.point.metric,
        "step": conflict.point.step,
        "stored_value": encode_number(conflict.stored_value),
        "sent_value": encode_number(conflict.point.value),
    }


def _describe_request(request: EvalRequest) -> dict[str, Any]:
    best = {"step": request.best_step, "uri": request.best_uri}
    shared = {name: getattr(request, name) for name in ("id", "step", "multiplier", "seed", "deadline_at")}
    return shared | {"best_checkpoint": best}


@answers(StoredObservation)
class ObservationOut(Answer):
    """A stored observation."""

    value: Stored = Field(description="in the unit of the metric")
    time: Time | None = Field(description="when it was measured; null: not reported")


@router.get("/runs/{run_id}/observations")
def list_observations(
    run_id: RunId,
    metric: Annotated[Name, Query(description="the name of the series")],
    caller: Read,
    database: Db,
    cursor: Annotated[
        int | None,
        Query(ge=0, le=MAX_STEP, description="`next_cursor` of the previous page; default: the first page"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="maximum number of items per page")] = 1000,
) -> Page[ObservationOut]:
    """One metric's observations by ascending step, without those that a resume superseded."""
    with database.reading() as tx:
        runs.load_run(tx, caller.project_id, run_id)
        items = observations.list_observations(tx, run_id, metric, after=cursor, limit=limit)
    return Page[ObservationOut](
        items=[ObservationOut.model_validate(vars(item) | {"time": item.observed_at}) for item in items],
        next_cursor=str(items[-1].step) if len(items) == limit else None,
    )
