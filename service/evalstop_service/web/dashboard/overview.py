"""The overview: savings, precision, open stops, and runs that need attention."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from fastapi import APIRouter, Request, Response

from evalstop_service.evaluation import figures
from evalstop_service.store import case_counts, decisions, outcomes, pending_actions, proposals, run_lists
from evalstop_service.store.case_counts import CaseFilter
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.outcomes import Outcome
from evalstop_service.store.pending_actions import Excerpt
from evalstop_service.store.proposals import Proposal
from evalstop_service.web.dashboard import formatting
from evalstop_service.web.dashboard.live_updates import SeenRevision, stream_changes
from evalstop_service.web.dashboard.responses import PageRoute, render_page
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

MOST_SHOWN = 5
MOST_DECISIONS = 12


@dataclass(frozen=True)
class Overview:
    """What the page shows beside its figures, and their revision."""

    cases: str
    proposals: list[Proposal]
    open_stops: Excerpt
    suspects: Excerpt
    stale: Excerpt
    without_data: Excerpt
    recent: list[tuple[Decision, Outcome | None]]
    any_run: bool

    @property
    def revision(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@router.get("/")
def show_overview(site: SiteOf, visitor: SignedIn) -> Response:
    """The overview of the project."""
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        overview = _load_overview(tx, visitor.project.id, site.clock())
        (whole,) = figures.load_figures(tx, visitor.project.id, CaseFilter())
    return render_page(
        "overview.html",
        visitor=visitor,
        overview=overview,
        whole=whole,
        states=formatting.STATES,
        price=visitor.project.price_per_gpu_hour,
        currency=visitor.project.currency,
    )


@router.get("/overview/events")
def follow_overview(request: Request, site: SiteOf, visitor: SignedIn, seen: SeenRevision) -> Response:
    """Send an event whenever the page has changed."""
    project_id = visitor.project.id
    return stream_changes(request, site, seen, lambda tx: _load_overview(tx, project_id, site.clock()).revision)


def _load_overview(tx: Transaction, project_id: UUID, now: datetime) -> Overview:
    cases = case_counts.read_revision(tx, project_id)
    recent = decisions.list_decisions(tx, project_id, limit=MOST_DECISIONS)
    labels = outcomes.load_outcomes(tx, [(decision.run_id, decision.attempt) for decision in recent])
    return Overview(
        cases,
        proposals.list_open(tx, project_id, now),
        pending_actions.list_waiting_stops(tx, project_id, MOST_SHOWN),
        pending_actions.list_suspect_runs(tx, project_id, MOST_SHOWN),
        pending_actions.list_stale_runs(tx, project_id, MOST_SHOWN),
        pending_actions.list_runs_without_data(tx, project_id, MOST_SHOWN),
        [(decision, labels.get((decision.run_id, decision.attempt))) for decision in recent],
        bool(recent) or bool(run_lists.list_runs(tx, project_id, limit=1)),
    )
