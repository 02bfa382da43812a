"""Small charts of the metrics of a run that are not in its main chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response

from evalstop_service.store import observations, series
from evalstop_service.store.observations import LatestObservation
from evalstop_service.store.series import Segment
from evalstop_service.web.dashboard.charted_series import list_charted
from evalstop_service.web.dashboard.responses import PageRoute, make_link, render_page
from evalstop_service.web.dashboard.sparkline import STRETCHES, Frame
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

A_PAGE = 24
MOST_SHOWN = 480


@dataclass(frozen=True)
class MetricChart:
    """The line of a metric and the frame that it fills; none without finite values."""

    latest: LatestObservation
    line: str
    frame: Frame | None


@router.get("/metric-charts")
def show_metric_charts(
    run_id: UUID, site: SiteOf, visitor: SignedIn, shown: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = A_PAGE
) -> Response:
    """The first `shown` charts, by name."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        charted = list_charted(run)
        other_metrics = [item for item in observations.list_latest(tx, run.id) if item.metric not in charted]
        segments = series.load_segments(tx, [(run.id, item.metric) for item in other_metrics[:shown]], STRETCHES)
    charts = [_draw_chart(item, segments.get((run.id, item.metric), ())) for item in other_metrics[:shown]]
    more_link = make_link(f"/runs/{run.id}/metric-charts", {"shown": min(shown + A_PAGE, MOST_SHOWN)})
    remaining_count = max(0, len(other_metrics) - shown)
    return render_page(
        "metric_charts.html",
        visitor=visitor,
        run=run,
        charts=charts,
        left=remaining_count,
        more=more_link if remaining_count and shown < MOST_SHOWN else None,
    )


def _draw_chart(latest: LatestObservation, segments: Sequence[Segment]) -> MetricChart:
    frame = Frame.around(segments) if segments else None
    return MetricChart(latest, frame.line(segments) if frame else "", frame)
