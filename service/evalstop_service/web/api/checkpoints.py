"""Routes of checkpoints: register and list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from evalstop_service.domain.fields import Body, Plain
from evalstop_service.ingest import CheckpointSaved, Message
from evalstop_service.store import run_details, runs
from evalstop_service.store.queue import outbox
from evalstop_service.store.run_details import Checkpoint
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.schemas import Answer, BestCheckpointOut, Items, RunId, Step, answers
from evalstop_service.web.context import Commit, Db, Ingest, ReadOrReport

router = APIRouter(prefix="/runs/{run_id}/checkpoints", tags=["checkpoints"], route_class=JsonRoute)


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


@router.post("", status_code=201, responses={200: {"model": RegisteredOut, "description": "It exists."}})
def register_checkpoint(
    run_id: RunId, body: CheckpointIn, caller: Ingest, committer: Commit, response: Response
) -> RegisteredOut:
    """Register a checkpoint. It can become the best checkpoint when its step has an eval."""
    receipt = committer.submit_and_wait(Message(caller.project_id, run_id, CheckpointSaved(body.step, body.uri)))
    response.status_code = 201 if receipt.created else 200
    return RegisteredOut.model_validate(
        {"step": body.step, "uri": body.uri, "created": receipt.created, "best_checkpoint": receipt.run.best_checkpoint}
    )


@router.get("")
def list_checkpoints(run_id: RunId, caller: ReadOrReport, database: Db) -> Items[CheckpointOut]:
    """The run's checkpoints by ascending step, without superseded ones.

    A key bound to endpoints sees those of runs whose stop was sent to its endpoints.
    """
    with database.reading() as tx:
        runs.load_run(tx, caller.project_id, run_id)
        if caller.key.endpoint_ids:
            caller.require_endpoint(*outbox.list_stop_endpoints(tx, run_id))
        return Items[CheckpointOut].model_validate({"items": run_details.list_checkpoints(tx, run_id)})
