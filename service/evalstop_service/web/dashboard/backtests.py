"""The pages of backtests: a policy is asked to show what it would have done, and one looks on."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.errors import NotFound
from evalstop_service.evaluation import backtests
from evalstop_service.projects import policies
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.web.dashboard import formatting
from evalstop_service.web.dashboard.live_updates import Seen, follow
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import Operating, SignedIn, SiteOf

router = APIRouter(prefix="/policies/backtests", route_class=PageRoute)

MOST_SHOWN = 200


@router.post("")
def ask(
    site: SiteOf,
    visitor: Operating,
    policy: Annotated[str, Form(max_length=100)],
    runs: Annotated[int, Form(ge=1, le=backtests.MOST_RUNS)] = backtests.MOST_RUNS,
) -> Response:
    """Have a policy tried on the newest runs that have ended."""
    with site.database.reading() as tx:
        document = policies.referred(tx, visitor.project.id, policy).document
    asked = backtests.request_backtest(site.database, visitor.project.id, document, runs, visitor.actor, site.clock())
    return RedirectResponse(f"/policies/backtests/{asked.id}", 303)


@router.get("/{backtest_id}")
def show_backtest(backtest_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """How far it got, what it found, and where that differs from what was decided."""
    with site.database.reading() as tx:
        revision = backtest_rows.read_revision(tx, visitor.project.id, backtest_id)
        found = backtest_rows.find_backtest(tx, visitor.project.id, backtest_id)
    if found is None:
        raise NotFound
    ordered = backtests.sort_findings(found.findings)
    return page(
        "backtest.html",
        visitor=visitor,
        backtest=found,
        revision=revision,
        figures=backtests.summarize_findings(found.findings),
        differing=sum(map(backtests.differs, ordered)),
        findings=ordered[:MOST_SHOWN],
        left_out=max(0, len(ordered) - MOST_SHOWN),
        states=formatting.STATES,
    )


@router.get("/{backtest_id}/events")
def follow_backtest(backtest_id: UUID, request: Request, site: SiteOf, visitor: SignedIn, seen: Seen) -> Response:
    """Tell whenever it has got on."""
    with site.database.reading() as tx:
        if backtest_rows.read_revision(tx, visitor.project.id, backtest_id) is None:
            raise NotFound
    return follow(request, site, seen, lambda tx: backtest_rows.read_revision(tx, visitor.project.id, backtest_id))
