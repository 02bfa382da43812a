"""The route of scrapes: a trainer's Prometheus metrics, posted unchanged."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from evalstop_service.decisions.commands import tell_trainer
from evalstop_service.domain.fields import Name
from evalstop_service.errors import Invalid
from evalstop_service.ingest import Message, Observations
from evalstop_service.web.api.observation_results import receipt_json
from evalstop_service.web.api.observations import ReceiptOut
from evalstop_service.web.api.reading import openmetrics
from evalstop_service.web.api.reading.openmetrics import Stepping
from evalstop_service.web.api.schemas import RunId, Step
from evalstop_service.web.context import Commit, Ctx, Ingest, Tell
from evalstop_service.web.limits import in_thread
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

router = APIRouter(prefix="/runs/{run_id}/openmetrics", tags=["observations"])

OPENMETRICS = "application/openmetrics-text"
TAKEN = (OPENMETRICS, "text/plain", "application/x-www-form-urlencoded")
"""The last is curl's default for a body."""

_REQUEST = {
    "requestBody": {
        "required": True,
        "description": f"`{OPENMETRICS}` is parsed strictly; anything else as Prometheus's text format.",
        "content": {"text/plain": {"schema": {"type": "string", "examples": ["eval_accuracy 0.61\n"]}}},
    }
}


@router.post("", response_model=ReceiptOut, openapi_extra=_REQUEST)
async def post_scrape(
    run_id: RunId,
    request: Request,
    caller: Ingest,
    committer: Commit,
    clock: Tell,
    context: Ctx,
    step: Annotated[Step | None, Query(description="the step of all values")] = None,
    step_label: Annotated[Name | None, Query(description="the label that holds each value's step")] = None,
    step_metric: Annotated[Name | None, Query(description="the metric of the scrape that is the step")] = None,
    metric: Annotated[list[Name] | None, Query(max_length=100, description="store only these metrics")] = None,
) -> Response:
    """Store the gauges and counters of a scrape and return the verdict. The default step is each value's time in
    seconds."""
    if sum(source is not None for source in (step, step_label, step_metric)) > 1:
        raise Invalid("set at most one of step, step_label and step_metric")
    media_type = request.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
    if media_type not in TAKEN:
        raise Problem(415, ProblemKind.NOT_A_SCRAPE, f"send it as `Content-Type: {OPENMETRICS}` or `text/plain`")
    body = await request.body()
    if len(body) > openmetrics.MOST_SCRAPE_BYTES:
        raise Problem(413, ProblemKind.SCRAPE_TOO_LARGE, "the limit is 1 MiB; nothing was stored. Send it in parts")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is not UTF-8. Nothing was stored"
        raise Problem(400, ProblemKind.UNREADABLE_TEXT, detail) from error
    read = partial(
        openmetrics.read_observations,
        text,
        Stepping(step, step_label, step_metric),
        metric or (),
        strict=media_type == OPENMETRICS,
    )
    points = await in_thread(read)()
    receipt = await committer.submit(Message(caller.project_id, run_id, Observations(points), caller.key.id))
    should_stop = await in_thread(tell_trainer)(context.database, clock, receipt.decision)
    return Response(receipt_json(receipt, should_stop, clock()), media_type="application/json")
