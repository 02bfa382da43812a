"""The numbers of a run as they are on record: page by page, and all of them as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote, urlencode
from uuid import UUID

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from evalstop_service.clock import rfc3339
from evalstop_service.store import observations
from evalstop_service.store.observations import MAX_STEP, StoredPoint
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import SignedIn, Site, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

PAGE = 100
AT_A_TIME = 5_000
COLUMNS = ("metric", "step", "value", "stderr", "observed_at", "received_at", "attempt", "superseded_by")

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@router.get("/numbers")
def show_numbers(
    run_id: UUID,
    site: SiteOf,
    visitor: SignedIn,
    metric: Annotated[str, Query(max_length=256)] = "",
    step: Annotated[int, Query(ge=-1, le=MAX_STEP)] = -1,
    superseded_by: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    """One metric's observations past a step, superseded ones too."""
    with site.database.reading() as tx:
        run = visitor.run(tx, run_id)
        known = observations.list_latest(tx, run.id)
        names = [item.metric for item in known]
        chosen = metric if metric in names else next((name for name in [*run.metrics, *names] if name in names), None)
        found = (
            observations.list_observations(tx, run.id, metric=chosen, after=(step, superseded_by), limit=PAGE + 1)
            if chosen
            else []
        )
    rows, more = found[:PAGE], len(found) > PAGE
    return page(
        "numbers.html",
        visitor=visitor,
        run=run,
        names=names,
        metric=chosen,
        rows=rows,
        first_page=_link(run, metric=chosen) if step >= 0 else None,
        next_page=_link(run, metric=chosen, step=rows[-1].step, superseded_by=rows[-1].superseded_by) if more else None,
    )


@router.get("/export.csv")
def export_csv(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """All observations of a run, a line each. A name that a spreadsheet would take for a formula gets an apostrophe."""
    with site.database.reading() as tx:
        run = visitor.run(tx, run_id)

    def lines() -> Iterator[str]:
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(COLUMNS)
        for point in _all(site, run):
            name = f"'{point.metric}" if point.metric.startswith(_FORMULA) else point.metric
            writer.writerow([name, *(_csv(value) for value in _values(point)[1:])])
            if buffer.tell() > 1 << 16:
                yield buffer.getvalue()
                buffer.seek(0)
                buffer.truncate()
        yield buffer.getvalue()

    return _attached(lines(), run, "csv", "text/csv; charset=utf-8")


@router.get("/export.json")
def export_json(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """What is known of a run, and all its observations; values that are not finite are strings, as the API has them."""
    with site.database.reading() as tx:
        run = visitor.run(tx, run_id)
    head = {
        "id": str(run.id),
        "name": run.name,
        "status": run.status,
        "attempt": run.attempt,
        "metrics": run.metrics,
        "labels": run.labels,
        "policy": f"{run.policy_name}@{run.policy_version}",
        "mode": run.mode,
        "verdict": run.verdict,
        "best_checkpoint": run.best_checkpoint,
        "turn": run.turn,
        "columns": COLUMNS,
    }

    def parts() -> Iterator[str]:
        yield json.dumps(head)[:-1] + ', "observations": ['
        comma = ""
        for point in _all(site, run):
            yield f"{comma}\n{json.dumps(_values(point))}"
            comma = ","
        yield "\n]}\n"

    return _attached(parts(), run, "json", "application/json")


def _all(site: Site, run: Run) -> Iterator[StoredPoint]:
    """All observations by metric and step; a short transaction for some thousand, so that a slow reader holds none."""
    with site.database.reading() as tx:
        names = [item.metric for item in observations.list_latest(tx, run.id)]
    for name in names:
        after = (-1, 0)
        while True:
            with site.database.reading() as tx:
                found = observations.list_observations(tx, run.id, metric=name, after=after, limit=AT_A_TIME)
            yield from found
            if len(found) < AT_A_TIME:
                break
            after = (found[-1].step, found[-1].superseded_by)


def _values(point: StoredPoint) -> list[str | int | float | None]:
    return [
        point.metric,
        point.step,
        _number(point.value),
        point.stderr if point.stderr is None else _number(point.stderr),
        rfc3339(point.observed_at) if point.observed_at else None,
        rfc3339(point.received_at),
        point.attempt,
        point.superseded_by or None,
    ]


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _csv(value: str | float | None) -> str:
    return "" if value is None else str(value)


def _attached(parts: Iterator[str], run: Run, suffix: str, media_type: str) -> Response:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("-.")[:80] or "run"
    exact = quote(run.name[:80] + "." + suffix, safe="")
    return StreamingResponse(
        parts,
        media_type=media_type,
        headers={"Content-Disposition": f"attachment; filename=\"{plain}.{suffix}\"; filename*=UTF-8''{exact}"},
    )


def _link(run: Run, **parameters: str | int | None) -> str:
    return f"/runs/{run.id}/numbers?{urlencode(parameters)}"
