"""The observations of a run: page by page, and all of them as CSV."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from evalstop_service.store import observations
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.web.limits import in_thread
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

PAGE = 100
EXPORT_BATCH = 5_000
COLUMNS = ("metric", "step", "value", "stderr", "observed_at", "received_at", "attempt", "superseded_by")

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_NOT_FINITE = {None: "NaN", math.inf: "Infinity", -math.inf: "-Infinity"}


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
        names = [item.metric for item in observations.list_latest(tx, run)]
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
        yield ",".join(COLUMNS) + "\r\n"
        after: tuple[str, int, int] | None = None
        while True:
            with site.database.reading() as tx:  # a short one, so that a slow client does not hold it open
                rows = observations.list_exported(tx, run.id, after=after, limit=EXPORT_BATCH)
            yield _format_rows(rows)
            if len(rows) < EXPORT_BATCH:
                return
            after = (rows[-1][0], rows[-1][1], rows[-1][-1] or 0)

    async def send() -> AsyncIterator[str]:
        # Starlette would take any free thread for each part; these are a lane's, of which a sender has a share.
        parts = write_csv()
        while (part := await in_thread(next)(parts, None)) is not None:
            yield part

    ascii_name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("-.")[:80] or "run"
    full_name = quote(f"{run.name[:80]}.csv", safe="")
    disposition = f"attachment; filename=\"{ascii_name}.csv\"; filename*=UTF-8''{full_name}"
    return StreamingResponse(send(), media_type="text/csv; charset=utf-8", headers={"Content-Disposition": disposition})


def _format_rows(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV. Only names need quotes; the csv module looks for them everywhere, and takes twice as long."""
    names = {metric: _quote_name(metric) for metric in {row[0] for row in rows}}
    lines = [
        f"{names[metric]},{step},{_NOT_FINITE.get(value) or repr(value)},"
        f"{'' if stderr is None else _NOT_FINITE.get(stderr) or repr(stderr)},"
        f"{observed_at or ''},{received_at},{attempt},{superseded_by or ''}\r\n"
        for metric, step, value, stderr, observed_at, received_at, attempt, superseded_by in rows
    ]
    return "".join(lines)


def _quote_name(metric: str) -> str:
    """A name, with an apostrophe before it if a spreadsheet would run it as a formula."""
    name = f"'{metric}" if metric.startswith(_FORMULA_STARTS) else metric
    return '"{}"'.format(name.replace('"', '""')) if set(name) & set(',"\r\n') else name
