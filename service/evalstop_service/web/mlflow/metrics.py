"""Routes of metrics: their values by step."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from evalstop_service.store import observations
from evalstop_service.web.api.schemas import Name
from evalstop_service.web.context import Db
from evalstop_service.web.mlflow import responses
from evalstop_service.web.mlflow.authentication import MlflowRoute, ReadOrIngest
from evalstop_service.web.mlflow.requests import Document
from evalstop_service.web.mlflow.run_logger import load_run, parse_run_id

MAX_HISTORY = 10_000

router = APIRouter(prefix="/metrics", route_class=MlflowRoute)


@router.get("/get-history")
def get_history(
    caller: ReadOrIngest,
    database: Db,
    metric_key: Annotated[Name, Query()],
    run_id: str | None = None,
    run_uuid: str | None = None,
    max_results: Annotated[int | None, Query(ge=1)] = None,
    page_token: Annotated[str | None, Query(pattern=r"^[0-9]{1,16}\.[0-9]{1,9}$")] = None,
) -> Document:
    """All values of a metric by step, page by page."""
    limit = min(max_results or MAX_HISTORY, MAX_HISTORY)
    after = None
    if page_token is not None:
        step, superseded_by = map(int, page_token.split("."))
        after = (step, superseded_by)
    with database.reading() as tx:
        run = load_run(tx, caller.project_id, parse_run_id(run_id or run_uuid))
        points = observations.list_observations(tx, run.id, metric=metric_key, after=after, limit=limit)
    answer: Document = {"metrics": responses.history_document(points, metric_key)}
    if len(points) == limit:
        answer["next_page_token"] = f"{points[-1].step}.{points[-1].superseded_by}"
    return answer
