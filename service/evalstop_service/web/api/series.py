"""Series: one metric of a run at a chosen resolution, without averaging a spike away."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field

from evalstop_service.store import series
from evalstop_service.web.api.runs import found
from evalstop_service.web.api.schemas import MAX_STEP, Answer, Name, Stored
from evalstop_service.web.context import Db, Read

router = APIRouter(prefix="/runs/{run_id}/series", tags=["observations"])

MOST_BUCKETS = 2000


class BucketOut(Answer):
    """Neighboring observations of a metric; superseded ones are left out."""

    first_step: int
    last_step: int
    count: int = Field(description="how many observations; those that are not finite count, too")
    lowest: float | None = Field(description="the lowest finite value; null when there is none")
    highest: float | None = Field(description="the highest finite value; null when there is none")
    last: Stored = Field(description="the value at `last_step`")
    nan_count: int
    infinite_count: int


class SeriesOut(Answer):
    """One metric of a run by ascending step."""

    metric: str
    buckets: list[BucketOut]


@router.get("")
def get_series(
    run_id: UUID,
    metric: Annotated[Name, Query()],
    caller: Read,
    database: Db,
    buckets: Annotated[int, Query(ge=1, le=MOST_BUCKETS, description="the most that are answered")] = 500,
    first_step: Annotated[int, Query(alias="from", ge=0, le=MAX_STEP, description="the first step")] = 0,
    last_step: Annotated[int, Query(alias="to", ge=0, le=MAX_STEP, description="the last step")] = MAX_STEP,
) -> SeriesOut:
    """The lowest, the highest and the last value of each bucket; buckets hold about as many observations each."""
    with database.reading() as tx:
        found(tx, caller.project_id, run_id)
    series.catch_up_summaries(database, run_id, metric)
    with database.reading() as tx:
        items = series.load_buckets(tx, run_id, metric, first_step, last_step, buckets)
    return SeriesOut(metric=metric, buckets=[BucketOut.model_validate(item) for item in items])
