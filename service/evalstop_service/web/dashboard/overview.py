"""The first page: what it has saved, how often it was right, and what wants a person now."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from uuid import UUID

from fastapi import APIRouter, Request, Response

from evalstop_service.evaluation import figures
from evalstop_service.store import case_counts, decisions, outcomes, pending_actions, runs
from evalstop_service.store.case_counts import CaseFilter
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.outcomes import Outcome
from evalstop_service.store.pending_actions import Excerpt
from evalstop_service.web.dashboard import formatting
from evalstop_service.web.dashboard.live_updates import Seen, follow
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

MOST_SHOWN = 5
MOST_DECISIONS = 12


@dataclass(frozen=True)
class Standing:
    """What the page shows beside its figures, and the revision of these; two that are the same look the same."""

    cases: str
    waiting: Excerpt
    suspects: Excerpt
    stale: Excerpt
    blind: Excerpt
    recent: list[tuple[Decision, Outcome | None]]
    any_run: bool

    @property
    def revision(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@router.get("/")
def show_overview(site: SiteOf, visitor: SignedIn) -> Response:
    """What it has saved, how often it was right, what waits, and the newest decisions."""
    with site.database.reading() as tx:
        # Read first: what follows may be newer, never older.
        standing = _standing(tx, visitor.project.id)
        (whole,) = figures.load_figures(tx, visitor.project.id, CaseFilter())
    return page(
        "overview.html",
        visitor=visitor,
        standing=standing,
        whole=whole,
        states=formatting.STATES,
        price=visitor.project.price_per_gpu_hour,
        currency=visitor.project.currency,
    )


@router.get("/overview/events")
def follow_overview(request: Request, site: SiteOf, visitor: SignedIn, seen: Seen) -> Response:
    """Tell whenever what the page shows has changed."""
    return follow(request, site, seen, lambda tx: _standing(tx, visitor.project.id).revision)


def _standing(tx: Transaction, project_id: UUID) -> Standing:
    cases = case_counts.read_revision(tx, project_id)
    recent = decisions.list_decisions(tx, project_id, limit=MOST_DECISIONS)
    said = outcomes.load_outcomes(tx, [(decision.run_id, decision.attempt) for decision in recent])
    return Standing(
        cases,
        pending_actions.list_waiting_stops(tx, project_id, MOST_SHOWN),
        pending_actions.list_suspect_runs(tx, project_id, MOST_SHOWN),
        pending_actions.list_stale_runs(tx, project_id, MOST_SHOWN),
        pending_actions.list_runs_without_data(tx, project_id, MOST_SHOWN),
        [(decision, said.get((decision.run_id, decision.attempt))) for decision in recent],
        bool(recent) or bool(runs.list_runs(tx, project_id, limit=1)),
    )
