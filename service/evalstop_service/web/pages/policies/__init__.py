"""The pages of policies: their list, one version with its rollout stage, the editor, and backtests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

from evalstop_detectors import InvalidPolicy, Policy, policy_from_document, policy_to_document
from evalstop_detectors.policy.policy import member_ids
from fastapi import APIRouter, Form, Query, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import second_person
from evalstop_service.domain.statuses import ProposalKind
from evalstop_service.errors import Conflict, Invalid, NotFound, QuotaReached
from evalstop_service.evaluation import backtests, figures, rollout_stage
from evalstop_service.evaluation.rollout_stage import StageCases, StageTerms
from evalstop_service.projects import policies
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.store import cases, proposals, rollout_stages
from evalstop_service.store import policies as policy_rows
from evalstop_service.store.backtests import Backtest
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Transaction
from evalstop_service.store.policies import StoredPolicy
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.web.api.json_body import load
from evalstop_service.web.pages import formatting, forms
from evalstop_service.web.pages.forms import QUEUE
from evalstop_service.web.pages.responses import Days, PageRoute, find_beginning, render_page
from evalstop_service.web.pages.visitor import Admin, FreshAdmin, Operator, SignedIn, Site, SiteOf, Visitor

router = APIRouter(prefix="/policies", route_class=PageRoute)

MOST_BACKTESTS = 10
MOST_SHOWN = 200

VersionNumber = Annotated[int | None, Query(ge=1, le=2**31 - 1)]


@router.get("")
def show_policies(site: SiteOf, visitor: SignedIn, days: Days = "") -> Response:
    """The newest version of each policy, its figures, and recent backtests."""
    case_filter = CaseFilter(since=find_beginning(days, site.clock()))
    with site.database.reading() as tx:
        counts = cases.count_cases(tx, visitor.project.id, case_filter, ("policy",))
        stages = rollout_stages.load_stages(tx, visitor.project.id)
        versions = policy_rows.list_policies(tx, visitor.project.id)
        recent = backtest_rows.list_backtests(tx, visitor.project.id, MOST_BACKTESTS)
    newest: dict[str, StoredPolicy] = {}
    for version in versions:
        newest.setdefault(version.name, version)
    return render_page(
        "policies.html",
        visitor=visitor,
        days=days,
        measured={group.key: group for group in figures.compute_figures(counts)},
        stages=stages,
        newest=list(newest.values()),
        version_counts={name: sum(version.name == name for version in versions) for name in newest},
        recent=recent,
    )


@router.get("/{name}")
def show_policy(name: str, site: SiteOf, visitor: SignedIn, version: VersionNumber = None) -> Response:
    """One version of a policy."""
    with site.database.reading() as tx:
        versions = policy_rows.list_policies(tx, visitor.project.id)
        ladder = load_ladder(tx, visitor, site, name)
    policy_versions = [policy for policy in versions if policy.name == name]
    shown = next((policy for policy in policy_versions if version in (None, policy.version)), None)
    if shown is None:
        raise NotFound
    return render_page(
        "policy.html",
        visitor=visitor,
        shown=shown,
        ladder=ladder,
        versions=policy_versions,
        members=name_members(shown.document),
        text=formatting.format_json(shown.document),
    )


def name_members(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The members with their ids."""
    members = document["members"]
    ids = member_ids([(member.get("id"), member["detector"]) for member in members])
    return list(zip(ids, members, strict=True))


_FARTHEST_DAYS = 36_500.0
_OF_STAGE = (ProposalKind.RAISE_STAGE, ProposalKind.REMOVE_STAGE, ProposalKind.CHANGE_STAGE)


@dataclass(frozen=True)
class Ladder:
    """The stage of a policy, the cases behind it, and the open proposal."""

    current: RolloutStage
    cases: StageCases
    proposed: Sequence[Proposal]
    now: datetime

    @property
    def missing(self) -> int | None:
        """The cases that the next step still takes; None: more of them do not help."""
        return self.cases.count_missing(self.current.required_precision)

    @property
    def decided_at(self) -> datetime | None:
        """When the missing cases will be there at the rate of this stage; None: no such rate, or centuries."""
        counted = self.cases.since.decided + self.cases.since.undecided
        days = (self.now - self.current.since) / timedelta(days=1) * (self.missing or 0) / max(1, counted)
        return self.now + timedelta(days=days) if counted and days < _FARTHEST_DAYS else None

    @property
    def reached(self) -> float:
        """The lower bound that has to reach the required precision: the smaller one of its two conditions."""
        return min(self.cases.of_version.bounds.low, self.cases.since.bounds.low)


def load_ladder(tx: Transaction, visitor: Visitor, site: SiteOf, name: str) -> Ladder | None:
    """The ladder of a policy; None if it has no rollout stage."""
    current = rollout_stages.find_stage(tx, visitor.project.id, name)
    if current is None:
        return None
    listed = proposals.list_open(tx, visitor.project.id, site.clock(), [name])
    proposed = [proposal for proposal in listed if proposal.kind in _OF_STAGE]
    return Ladder(current, rollout_stage.load_stage_cases(tx, current), proposed, site.clock())


@router.post("/{name}/stage")
def set_terms(
    name: str,
    site: SiteOf,
    visitor: FreshAdmin,
    required_percent: Annotated[float, Form(ge=50, lt=100)],
    canary_percent: Annotated[float, Form(gt=0, le=50)],
) -> Response:
    """Start a policy's rollout in shadow, or change its terms."""
    terms = StageTerms(required_percent / 100, canary_percent / 100)
    proposal = second_person.set_stage(site.database, visitor.author(site.clock()), name, terms)
    return RedirectResponse(f"/policies/{name}#stage" if proposal is None else QUEUE, 303)


@router.post("/{name}/stage/lower")
def lower_stage(name: str, site: SiteOf, visitor: Admin, reason: Annotated[str, Form()] = "") -> Response:
    """Move a policy back to shadow."""
    with site.database.transaction() as tx:
        policies.load_version(tx, visitor.project.id, name)
        rollout_stage.lower_stage(tx, visitor.author(site.clock()), name, forms.parse_reason(reason))
    return RedirectResponse(f"/policies/{name}#stage", 303)


Document = Annotated[str, Form(max_length=100_000)]

_REFUSALS = (InvalidPolicy, Invalid, Conflict, QuotaReached)


@router.get("/{name}/edit")
def edit_policy(
    name: str, site: SiteOf, visitor: Operator, version: VersionNumber = None, backtest: UUID | None = None
) -> Response:
    """The document of a version, or of the draft of a backtest, with its findings."""
    if backtest is None:
        with site.database.reading() as tx:
            policy = policies.load_version(tx, visitor.project.id, name, version)
        return _render_editor(site, visitor, name, formatting.format_json(policy.document))
    with site.database.reading() as tx:
        tried = backtest_rows.load_backtest(tx, visitor.project.id, backtest)
    return _render_editor(site, visitor, name, formatting.format_json(tried.document), backtest=tried)


@router.post("/{name}/edit")
def save_policy(name: str, site: SiteOf, visitor: Admin, document: Document = "") -> Response:
    """Save the document as the next version of its name, and show it, or propose it."""
    try:
        stored = second_person.add_policy(site.database, visitor.author(site.clock()), _read_policy(document))
    except _REFUSALS as error:
        return _render_editor(site, visitor, name, document, problem=str(error))
    if isinstance(stored, Proposal):
        return RedirectResponse(QUEUE, 303)
    return RedirectResponse(f"/policies/{stored.name}?version={stored.version}", 303)


@router.get("/backtests/{backtest_id}")
def show_backtest(backtest_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """Its findings, those that differ from the recorded decisions first."""
    with site.database.reading() as tx:
        backtest = backtest_rows.load_backtest(tx, visitor.project.id, backtest_id)
    ordered = backtests.sort_findings(backtest.findings)
    return render_page(
        "backtest.html",
        visitor=visitor,
        backtest=backtest,
        figures=backtests.summarize_findings(backtest.findings),
        differing=sum(finding.differs for finding in ordered),
        findings=ordered[:MOST_SHOWN],
        left_out=max(0, len(ordered) - MOST_SHOWN),
        name_state=formatting.name_state,
    )


@router.post("/{name}/edit/try")
def try_policy(
    name: str,
    site: SiteOf,
    visitor: Operator,
    document: Document = "",
    detector: Annotated[str, Form(max_length=100)] = "",
    version: Annotated[int | None, Form(ge=1, le=2**31 - 1)] = None,
) -> Response:
    """Backtest the document, or one of a version in which only `detector` decides, on the newest ended runs."""
    if detector:
        with site.database.reading() as tx:
            stored = policies.load_version(tx, visitor.project.id, name, version)
        document = formatting.format_json(_let_decide(stored.document, detector))
    try:
        draft = policy_to_document(_read_policy(document))
        backtest = backtests.run_backtest(
            site.database, visitor.project.id, draft, backtests.MOST_RUNS, visitor.actor, site.clock()
        )
    except _REFUSALS as error:
        return _render_editor(site, visitor, name, document, problem=str(error))
    return RedirectResponse(f"/policies/{name}/edit?backtest={backtest.id}", 303)


def _let_decide(document: Mapping[str, Any], detector: str) -> dict[str, Any]:
    """The policy, changed so that only this detector can stop a run and the others observe; raises NotFound."""
    named, others = name_members(document), {"observe": True, "suspect_at": None}
    if detector not in dict(named):
        raise NotFound
    members = [
        member | ({"observe": False} if name == detector else others if member["stop_at"] is not None else {})
        for name, member in named
    ]
    return {**document, "members": members, "at_least": 1}


def _read_policy(text: str) -> Policy:
    try:
        document: Any = load(text.encode())
    except ValueError as error:
        raise Invalid(f"this is not JSON: {error}") from error
    return policy_from_document(document)


def _render_editor(
    site: Site,
    visitor: Visitor,
    name: str,
    text: str,
    *,
    problem: str | None = None,
    backtest: Backtest | None = None,
) -> Response:
    with site.database.reading() as tx:
        policies.load_version(tx, visitor.project.id, name)
    return render_page(
        "policy_editor.html",
        200 if problem is None else 422,
        visitor=visitor,
        name=name,
        text=text,
        problem=problem,
        backtest=backtest,
        figures=backtest and backtests.summarize_findings(backtest.findings),
        most_runs=backtests.MOST_RUNS,
    )
