"""The fleet: the running runs on one page, the most likely to have turned first."""

from __future__ import annotations

from evalstop_detectors.detectors.detector import Kind
from fastapi import APIRouter, Response

from evalstop_service.domain.run import Call, Verdict
from evalstop_service.store import run_lists
from evalstop_service.store.runs import load_runs
from evalstop_service.web.pages import charts
from evalstop_service.web.pages.responses import PageRoute, render_page
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/fleet", route_class=PageRoute)

MOST_RANKED = 1000
MOST_SHOWN = 100
"""More take seconds to draw, and those that need a person are at the top."""

_SUPPOSED = {Call.STOP: 1.0, Call.SUSPECT: 0.5, Call.CONTINUE: 0.0}
"""The probability by which runs are ranked whose policy has no detector that estimates it."""

RENEWED_SECONDS = 10
"""Refresh interval of an open page. In a fleet some run always changes: following each change would cost more."""


@router.get("")
def show_fleet(site: SiteOf, visitor: SignedIn) -> Response:
    """The running runs, the most likely to have turned first."""
    revision = str(int(site.clock().timestamp()) // RENEWED_SECONDS)
    if visitor.seen == revision:
        return Response(status_code=204)
    with site.database.reading() as tx:
        running = run_lists.list_running_verdicts(tx, visitor.project.id, MOST_RANKED + 1)
        ranked = sorted(running, key=lambda listed: (-_rank(listed.verdict), listed.name))
        loaded = load_runs(tx, [listed.run_id for listed in ranked[:MOST_SHOWN]])
        runs = [loaded[listed.run_id] for listed in ranked[:MOST_SHOWN]]
        sparks = charts.draw_sparklines(tx, runs, {})
    return render_page(
        "fleet.html",
        visitor=visitor,
        runs=runs,
        sparks=sparks,
        find_probability=find_probability,
        more=len(running) > MOST_SHOWN,
        renewed_seconds=RENEWED_SECONDS,
        revision=revision,
    )


def _rank(verdict: Verdict) -> float:
    probability = find_probability(verdict)
    return _SUPPOSED[verdict.verdict] if probability is None else probability


def find_probability(verdict: Verdict) -> float | None:
    """The probability of having turned; None if the policy has no detector that estimates it."""
    return max((item.value for item in verdict.evidence if item.kind == Kind.POSTERIOR), default=None)
