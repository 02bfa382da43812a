"""The overview: what needs a person now, how often enforced policies are right, and what their stops saved."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Response

from evalstop_service.domain.confidence_sequences import Estimate
from evalstop_service.domain.decision_lifecycle import STOPPING, DecisionState
from evalstop_service.domain.statuses import ProposalState, Treatment
from evalstop_service.evaluation import figures
from evalstop_service.runs import health
from evalstop_service.store import cases, decisions, proposals, rollout_stages, run_lists, runs
from evalstop_service.store.cases import CaseFilter, Outcome
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.run_details import RunHealth
from evalstop_service.store.run_lists import Running
from evalstop_service.store.runs import Run
from evalstop_service.web.pages import charts, formatting, precision
from evalstop_service.web.pages.responses import Days, PageRoute, find_beginning, render_page
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

MOST_SHOWN = 20
"""Maximum number of items of each kind in the queue."""

MOST_DECISIONS = 8

WIDEST_INTERVAL = 0.5
"""Wider intervals are too uncertain to show a figure; those of single detectors are often nearly as wide."""


@dataclass(frozen=True)
class Overview:
    """The content of the page other than its figures, and their revision.

    `proposals`, `stops`, `without_data`, `stale`: the queue of items that a person can act on, in this order, with one
    more of each kind than is shown, if there are as many. `queued`: the runs that it shows.
    """

    cases: str
    proposals: list[Proposal]
    stops: list[Decision]
    without_data: list[RunHealth]
    stale: list[RunHealth]
    running: Running
    recent: list[tuple[Decision, Outcome | None]]
    any_run: bool
    queued: dict[UUID, Run]

    @property
    def revision(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def count(self) -> str:
        """The number of items in the queue; a kind with more than are shown counts as these, and a plus sign."""
        found = [len(items) for items in (self.proposals, self.stops, self.without_data, self.stale)]
        more = "+" if max(found) > MOST_SHOWN else ""
        return f"{sum(min(count, MOST_SHOWN) for count in found)}{more}"


@router.get("/")
def show_overview(site: SiteOf, visitor: SignedIn, days: Days = "") -> Response:
    """The overview of the project."""
    case_filter = CaseFilter(since=find_beginning(days, site.clock()))
    stopped = CaseFilter(since=case_filter.since, treatment=Treatment.STOPPED)
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        overview = _load_overview(tx, visitor.project.id, site.clock())
        if visitor.seen == overview.revision:
            return Response(status_code=204)
        counts = cases.count_cases(tx, visitor.project.id, case_filter, ("policy",))
        stages = rollout_stages.load_stages(tx, visitor.project.id)
        ranked = precision.rank_policies(figures.compute_figures(counts), stages)
        panels = precision.load_panels(tx, visitor.project.id, case_filter, ranked[:1], counts)
        decided = decisions.load_decisions(tx, overview.queued)
        sparks = charts.draw_sparklines(tx, list(overview.queued.values()), decided)
    return render_page(
        "overview.html",
        visitor=visitor,
        days=days,
        overview=overview,
        most=MOST_SHOWN,
        runs=overview.queued,
        last_report_at=health.last_report_at,
        sparks=sparks,
        whole=figures.compute_total(counts),
        enforced=[group for group in ranked if precision.is_enforced(group, stages)],
        stages=stages,
        panel=next((panel for panel in panels if panel.rows), None),
        link_calls=partial(precision.link_calls, case_filter),
        is_precise=is_precise,
        stopped_cases=f"/cases?{urlencode(figures.filter_to_query(stopped))}",
        name_state=formatting.name_state,
        unfinished=(*run_lists.TO_DECIDE, DecisionState.REQUESTED, DecisionState.ACKNOWLEDGED),
        stopping=STOPPING,
    )


def is_precise(estimate: Estimate) -> bool:
    """Whether an estimate is narrow enough to be shown as a figure."""
    return estimate.value is not None and estimate.high - estimate.low <= WIDEST_INTERVAL


def _load_overview(tx: Transaction, project_id: UUID, now: datetime) -> Overview:
    revision = cases.read_revision(tx, project_id)
    recent = decisions.list_decisions(tx, project_id, limit=MOST_DECISIONS)
    labels = cases.load_outcomes(tx, [(decision.run_id, decision.attempt) for decision in recent])
    stops = run_lists.list_stops_to_decide(tx, project_id, MOST_SHOWN + 1)
    without_data = run_lists.list_runs_without_data(tx, project_id, MOST_SHOWN + 1)
    stale = run_lists.list_stale_runs(tx, project_id, MOST_SHOWN + 1)
    return Overview(
        revision,
        proposals.list_proposals(tx, project_id, now, state=ProposalState.OPEN, limit=MOST_SHOWN + 1),
        stops,
        without_data,
        stale,
        run_lists.count_running(tx, project_id),
        [(decision, labels.get((decision.run_id, decision.attempt))) for decision in recent],
        bool(recent) or bool(run_lists.list_runs(tx, project_id, limit=1)),
        runs.load_runs(tx, [stop.run_id for stop in stops] + [alert.run_id for alert in (*without_data, *stale)]),
    )
