"""Route of series: one metric of a run, downsampled to minima and maxima."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from evalstop_service.store import series
from evalstop_service.web.api.runs import load_run
from evalstop_service.web.api.schemas import MAX_STEP, Answer, Name, RunId, Stored
from evalstop_service.web.context import Db, Read

router = APIRouter(prefix="/runs/{run_id}/series", tags=["observations"])

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


@router.get("")
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
        load_run(tx, caller.project_id, run_id)
    series.catch_up_summaries(database, run_id, metric)
    with database.reading() as tx:
        items = series.load_buckets(tx, run_id, metric, first_step, last_step, buckets)
    return SeriesOut(metric=metric, buckets=[BucketOut.model_validate(item) for item in items])
