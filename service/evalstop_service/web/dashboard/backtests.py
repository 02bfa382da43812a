"""The page of a backtest: its progress and findings."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter, Response

from evalstop_service.errors import require
from evalstop_service.evaluation import backtests
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.web.dashboard import formatting
from evalstop_service.web.dashboard.live_updates import Follow
from evalstop_service.web.dashboard.responses import PageRoute, render_page
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/policies/backtests", route_class=PageRoute)

MOST_SHOWN = 200


@router.get("/{backtest_id}")
def show_backtest(backtest_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """Its progress and findings, those that differ from the recorded decisions first."""
    with site.database.reading() as tx:
        revision = backtest_rows.read_revision(tx, visitor.project.id, backtest_id)
        backtest = backtest_rows.load_backtest(tx, visitor.project.id, backtest_id)
    ordered = backtests.sort_findings(backtest.findings)
    return render_page(
        "backtest.html",
        visitor=visitor,
        backtest=backtest,
        revision=revision,
        figures=backtests.summarize_findings(backtest.findings),
        differing=sum(finding.differs for finding in ordered),
        findings=ordered[:MOST_SHOWN],
        left_out=max(0, len(ordered) - MOST_SHOWN),
        name_state=formatting.name_state,
    )


@router.get("/{backtest_id}/events")
def follow_backtest(backtest_id: UUID, site: SiteOf, visitor: SignedIn, follow: Follow) -> Response:
    """Send an event whenever it has progressed."""
    with site.database.reading() as tx:
        require(backtest_rows.read_revision(tx, visitor.project.id, backtest_id), "such backtest")
    return follow(lambda tx: backtest_rows.read_revision(tx, visitor.project.id, backtest_id))
