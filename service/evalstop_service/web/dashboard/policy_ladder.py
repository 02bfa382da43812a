"""The rollout stage on a policy's page: the stages, the progress to the next one, and the forms that change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import second_person
from evalstop_service.domain.proposals import ProposalKind
from evalstop_service.domain.statuses import Stage
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageCases, StageTerms
from evalstop_service.projects import policies
from evalstop_service.store import proposals, rollout_stages
from evalstop_service.store.database import Transaction
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.notices import add_notice
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import Admin, FreshAdmin, SiteOf, Visitor

_OF_STAGE = (ProposalKind.RAISE_STAGE, ProposalKind.REMOVE_STAGE, ProposalKind.CHANGE_STAGE)

router = APIRouter(prefix="/policies/{name}/stage", route_class=PageRoute)


@dataclass(frozen=True)
class Ladder:
    """The stage of a policy, the cases behind it, and the open proposal.

    `have`: the cases that count for the next stage, by the stricter of its two conditions. `needed`: about how many it
    takes; None if there is no next stage, or if it is unknown.
    """

    current: RolloutStage
    cases: StageCases
    have: int
    needed: int | None
    proposed: Sequence[Proposal]

    @property
    def suffices(self) -> bool:
        """Whether its cases allow the next stage."""
        return self.needed is not None and self.have >= self.needed


def load_ladder(tx: Transaction, visitor: Visitor, site: SiteOf, name: str) -> Ladder | None:
    """The ladder of a policy; None if it has no rollout stage."""
    current = rollout_stages.find_stage(tx, visitor.project.id, name)
    if current is None:
        return None
    cases = rollout_stage.load_stage_cases(tx, current)
    narrower = min(cases.of_version, cases.since, key=lambda estimate: estimate.bounds.low)
    have = narrower.decided + narrower.undecided
    needed = None
    if current.stage is not Stage.ENFORCE:
        needed = rollout_stage.estimate_cases_needed(narrower, current.required_precision)
    proposed = [
        proposal
        for proposal in proposals.list_open(tx, visitor.project.id, site.clock(), [name])
        if proposal.kind in _OF_STAGE
    ]
    return Ladder(current, cases, have, needed, proposed)


@router.post("")
def set_terms(
    request: Request,
    name: str,
    site: SiteOf,
    visitor: FreshAdmin,
    required_percent: Annotated[float, Form(ge=50, lt=100)],
    canary_percent: Annotated[float, Form(gt=0, le=50)],
) -> Response:
    """Start a policy's rollout in shadow, or change its terms."""
    terms = StageTerms(required_percent / 100, canary_percent / 100)
    proposal = second_person.set_stage(site.database, visitor.author(site.clock()), name, terms)
    response = RedirectResponse(f"/policies/{name}#stage", 303)
    return response if proposal is None else add_notice(response, request, "proposed")


@router.post("/lower")
def lower_stage(name: str, site: SiteOf, visitor: Admin, reason: Annotated[str, Form()] = "") -> Response:
    """Move a policy back to shadow."""
    with site.database.transaction() as tx:
        policies.load_version(tx, visitor.project.id, name)
        rollout_stage.lower_stage(tx, visitor.author(site.clock()), name, forms.parse_reason(reason))
    return RedirectResponse(f"/policies/{name}#stage", 303)
