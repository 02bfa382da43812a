"""The observations of a run: page by page, and all of them as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from evalstop_service.clock import rfc3339
from evalstop_service.store import observations
from evalstop_service.store.observations import MAX_STEP, StoredObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.api.schemas import encode_number
from evalstop_service.web.limits import in_thread
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import SignedIn, Site, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

PAGE = 100
EXPORT_BATCH = 1_000
COLUMNS = ("metric", "step", "value", "stderr", "observed_at", "received_at", "attempt", "superseded_by")

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


@router.get("/observations")
def show_observations(
    run_id: UUID,
    site: SiteOf,
    visitor: SignedIn,
    metric: Annotated[str, Query(max_length=256)] = "",
    step: Annotated[int, Query(ge=-1, le=MAX_STEP)] = -1,
    superseded_by: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    """Observations of one metric after a step, superseded ones included."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        names = [item.metric for item in observations.list_latest(tx, run.id)]
        chosen = metric if metric in names else next((name for name in [*run.metrics, *names] if name in names), None)
        after = (step, superseded_by)
        points = (
            observations.list_observations(tx, run.id, metric=chosen, after=after, limit=PAGE + 1) if chosen else []
        )
    rows, path = points[:PAGE], f"/runs/{run.id}/observations"
    after_last = {"metric": chosen, "step": rows[-1].step, "superseded_by": rows[-1].superseded_by} if rows else {}
    return render_page(
        "observations.html",
        visitor=visitor,
        run=run,
        names=names,
        metric=chosen,
        rows=rows,
        first_page=make_link(path, {"metric": chosen}) if step >= 0 else None,
        next_page=make_link(path, after_last) if len(points) > PAGE else None,
    )


@router.get("/export.csv")
def export_csv(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """All observations of a run as CSV. Names that a spreadsheet would run as a formula get a leading apostrophe."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)

    def write_csv() -> Iterator[str]:
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(COLUMNS)
        for batch in _read_batches(site, run):
            for point in batch:
                name = f"'{point.metric}" if point.metric.startswith(_FORMULA_STARTS) else point.metric
                writer.writerow([name, *("" if value is None else str(value) for value in _list_values(point))])
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()

    async def send() -> AsyncIterator[str]:
        # Starlette would take any free thread for each part; these are a lane's, of which a sender has a share.
        parts = write_csv()
        while (part := await in_thread(next)(parts, None)) is not None:
            yield part

    ascii_name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("-.")[:80] or "run"
    full_name = quote(f"{run.name[:80]}.csv", safe="")
    disposition = f"attachment; filename=\"{ascii_name}.csv\"; filename*=UTF-8''{full_name}"
    return StreamingResponse(send(), media_type="text/csv; charset=utf-8", headers={"Content-Disposition": disposition})


def _read_batches(site: Site, run: Run) -> Iterator[Sequence[StoredObservation]]:
    """All observations by metric and step, in short transactions, so that a slow client does not hold one open."""
    after: observations.Key | None = None
    while True:
        with site.database.reading() as tx:
            batch = observations.list_observations(tx, run.id, after=after, limit=EXPORT_BATCH)
        yield batch
        if len(batch) < EXPORT_BATCH:
            return
        after = (batch[-1].metric, batch[-1].step, batch[-1].superseded_by)


def _list_values(point: StoredObservation) -> list[str | int | float | None]:
    """The values of `COLUMNS`, without the metric."""
    return [
        point.step,
        encode_number(point.value),
        point.stderr if point.stderr is None else encode_number(point.stderr),
        rfc3339(point.observed_at) if point.observed_at else None,
        rfc3339(point.received_at),
        point.attempt,
        point.superseded_by or None,
    ]
