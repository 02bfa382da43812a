"""Routes of checkpoints, and of requests to evaluate them now: register, list and answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from uuid import UUID

from fastapi import Path, Query, Response
from pydantic import Field

from evalstop_service.decisions.commands import tell_trainer
from evalstop_service.domain.fields import Body, Integral, Plain
from evalstop_service.errors import Conflict, require
from evalstop_service.ingest import CheckpointSaved, EvalAnswered, Message
from evalstop_service.runs.watched_metrics import PAIRED_METRIC
from evalstop_service.store import run_details, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.queue import outbox
from evalstop_service.store.run_details import Checkpoint, EvalRequest
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.observations import CheckpointPlaceOut
from evalstop_service.web.api.schemas import (
    Answer,
    BestCheckpointOut,
    Items,
    Limit,
    RunId,
    ShouldStop,
    Step,
    VerdictOut,
    answers,
)
from evalstop_service.web.context import AnyScope, Commit, Ctx, Db, Ingest, IngestOrReport, Now, ReadOrReport

router = create_router()

PATH = "/runs/{run_id}/checkpoints"


class CheckpointIn(Body):
    """The URI of a saved checkpoint."""

    step: Step = Field(description="the training step that it holds", examples=[120])
    uri: Annotated[str, Field(min_length=1, max_length=4096), Plain] = Field(
        description="where people and receivers find it", examples=["s3://runs/ppo/step-120"]
    )


class RegisteredOut(Answer):
    """The checkpoint, and the current best checkpoint."""

    step: int = Field(description="the training step that it holds")
    uri: str = Field(description="the URI that was sent")
    created: bool = Field(description="false: it was already registered")
    best_checkpoint: BestCheckpointOut | None = Field(description="null until a checkpoint has an eval")


@answers(Checkpoint)
class CheckpointOut(Answer):
    """A checkpoint that is not superseded."""


@router.post(
    PATH, status_code=201, tags=["checkpoints"], responses={200: {"model": RegisteredOut, "description": "It exists."}}
)
def register_checkpoint(
    run_id: RunId, body: CheckpointIn, caller: Ingest, committer: Commit, response: Response
) -> RegisteredOut:
    """Register a checkpoint. It can become the best checkpoint when its step has an eval."""
    receipt = committer.submit_and_wait(Message(caller.project_id, run_id, CheckpointSaved(body.step, body.uri)))
    response.status_code = 201 if receipt.created else 200
    return RegisteredOut.model_validate(
        {"step": body.step, "uri": body.uri, "created": receipt.created, "best_checkpoint": receipt.run.best_checkpoint}
    )


@router.get(PATH, tags=["checkpoints"])
def list_checkpoints(run_id: RunId, caller: ReadOrReport, database: Db) -> Items[CheckpointOut]:
    """The run's checkpoints by ascending step, without superseded ones.

    A key bound to endpoints sees the checkpoints of runs whose stop was sent to these endpoints.
    """
    with database.reading() as tx:
        runs.load_run(tx, caller.project_id, run_id)
        if caller.key.endpoint_ids:
            caller.require_endpoint(*outbox.list_stop_endpoints(tx, run_id))
        return Items[CheckpointOut].model_validate({"items": run_details.list_checkpoints(tx, run_id)})


class EvalAnswerIn(Body):
    """The result of a paired evaluation: the score of the current checkpoint minus that of the best one."""

    difference: Annotated[float, Field(allow_inf_nan=False)] = Field(
        description="in the unit of the eval metric", examples=[-0.021]
    )
    stderr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        description="the standard error of the difference, on the same prompts", examples=[0.008]
    )
    prompts: Annotated[int, Field(ge=1, le=2**31 - 1), Integral] | None = Field(
        None, description="number of prompts on which both were scored"
    )


@answers(EvalRequest)
class EvalRequestOut(Answer):
    """A requested paired evaluation, and its answer."""

    best_checkpoint: CheckpointPlaceOut = Field(description="the checkpoint to compare with")
    current_checkpoint: CheckpointPlaceOut | None = Field(
        description="the first one registered at or after the request's step; null: none yet"
    )
    seed: int = Field(description="both evaluations draw their prompts with this seed")


class EvalAnsweredOut(Answer):
    """The recorded answer, and the resulting verdict."""

    request: EvalRequestOut = Field(description="the request with its answer")
    verdict: VerdictOut = Field(description="the run's verdict, including the answer")
    should_stop: ShouldStop


@router.get("/eval-requests", tags=["eval requests"])
def list_open_eval_requests(
    caller: AnyScope,
    database: Db,
    now: Now,
    run_id: Annotated[list[UUID], Query(max_length=100, description="requests of these runs; default: all")] = [],  # noqa: B006 - FastAPI copies it
    limit: Limit = 50,
) -> Items[EvalRequestOut]:
    """The open requests, by deadline."""
    with database.reading() as tx:
        return _view_requests(tx, run_details.list_open_requests(tx, caller.project_id, run_id, now, limit))


@router.get("/runs/{run_id}/eval-requests", tags=["eval requests"])
def list_eval_requests(run_id: RunId, caller: AnyScope, database: Db) -> Items[EvalRequestOut]:
    """All requests of a run, by ascending attempt and step."""
    with database.reading() as tx:
        runs.load_run(tx, caller.project_id, run_id)
        return _view_requests(tx, run_details.list_requests(tx, run_id))


@router.post("/runs/{run_id}/eval-requests/{request_id}/answer", tags=["eval requests"])
def answer_eval_request(
    run_id: RunId,
    request_id: Annotated[UUID, Path(description="`id` of the request, as listed or sent in an event")],
    body: EvalAnswerIn,
    caller: IngestOrReport,
    context: Ctx,
) -> EvalAnsweredOut:
    """Answer a request. Repeating the same answer changes nothing; a different one is refused (409)."""
    with context.database.reading() as tx:
        runs.load_run(tx, caller.project_id, run_id)
        request = require(run_details.find_request(tx, run_id, request_id), f"request {request_id} of this run")
    point = PostedObservation(PAIRED_METRIC, request.step, body.difference, body.stderr)
    content = EvalAnswered(request_id, request.attempt, point, body.prompts, caller.actor)
    receipt = context.committer.submit_and_wait(Message(caller.project_id, run_id, content, caller.key.id))
    if receipt.conflicts:
        stored = receipt.conflicts[0].stored_value
        raise Conflict(f"this request was already answered, with a difference of {stored:g}; the first answer stands")
    should_stop = tell_trainer(context.database, context.clock, receipt.decision)
    with context.database.reading() as tx:
        answered = require(run_details.find_request(tx, run_id, request_id), "such request")
        shown = {"request": _view_requests(tx, [answered]).items[0], "verdict": receipt.run.verdict}
    return EvalAnsweredOut.model_validate(shown | {"should_stop": should_stop})


def _view_requests(tx: Transaction, requests: Sequence[EvalRequest]) -> Items[EvalRequestOut]:
    saved = run_details.load_checkpoints(tx, list({request.run_id for request in requests})) if requests else {}
    items = []
    for request in requests:
        later = (item for item in saved.get(request.run_id, ()) if item.step >= request.step)
        current = next(later, None)
        values = {name: getattr(request, name) for name in EvalRequest.__struct_fields__} | {
            "seed": request.seed,
            "best_checkpoint": {"step": request.best_step, "uri": request.best_uri},
            "current_checkpoint": {"step": current.step, "uri": current.uri} if current is not None else None,
        }
        items.append(EvalRequestOut.model_validate(values))
    return Items[EvalRequestOut](items=items)
