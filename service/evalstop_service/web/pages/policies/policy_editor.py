"""The page that edits a policy, with its errors and a backtest of the draft, and the page of a backtest."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from evalstop_detectors import InvalidPolicy, Policy, policy_from_document, policy_to_document
from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import second_person
from evalstop_service.errors import Conflict, Invalid, QuotaReached, require
from evalstop_service.evaluation import backtests
from evalstop_service.projects import policies
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.store.backtests import Backtest
from evalstop_service.store.proposals import Proposal
from evalstop_service.web.api.json_body import NotJson, load
from evalstop_service.web.pages import formatting
from evalstop_service.web.pages.cookies import add_notice
from evalstop_service.web.pages.responses import PageRoute, render_page
from evalstop_service.web.pages.visitor import Admin, Follow, Operator, SignedIn, Site, SiteOf, Visitor

router = APIRouter(prefix="/policies", route_class=PageRoute)

MOST_SHOWN = 200


@router.get("/backtests/{backtest_id}")
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


@router.get("/backtests/{backtest_id}/events")
def follow_backtest(backtest_id: UUID, site: SiteOf, visitor: SignedIn, follow: Follow) -> Response:
    """Send an event whenever it has progressed."""
    with site.database.reading() as tx:
        require(backtest_rows.read_revision(tx, visitor.project.id, backtest_id), "such backtest")
    return follow(lambda tx: backtest_rows.read_revision(tx, visitor.project.id, backtest_id))


Document = Annotated[str, Form(max_length=100_000)]

_REFUSALS = (InvalidPolicy, Invalid, Conflict, QuotaReached)


@router.get("/{name}/edit")
def edit_policy(
    name: str,
    site: SiteOf,
    visitor: Operator,
    version: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    backtest: UUID | None = None,
) -> Response:
    """The document of a version, or of the draft of a backtest, with its findings."""
    if backtest is None:
        with site.database.reading() as tx:
            policy = policies.load_version(tx, visitor.project.id, name, version)
        return _render_editor(site, visitor, name, formatting.format_json(policy.document))
    with site.database.reading() as tx:
        revision = backtest_rows.read_revision(tx, visitor.project.id, backtest)
        tried = backtest_rows.load_backtest(tx, visitor.project.id, backtest)
    text = formatting.format_json(tried.document)
    return _render_editor(site, visitor, name, text, backtest=tried, revision=revision)


@router.post("/{name}/edit")
def save_policy(request: Request, name: str, site: SiteOf, visitor: Admin, document: Document = "") -> Response:
    """Save the document as the next version of its name, and show what changed, or propose it."""
    try:
        stored = second_person.add_policy(site.database, visitor.author(site.clock()), _read_policy(document))
    except _REFUSALS as error:
        return _render_editor(site, visitor, name, document, problem=str(error))
    if isinstance(stored, Proposal):
        return add_notice(RedirectResponse(f"/policies/{stored.subject}", 303), request, "proposed")
    against = f"&against={stored.name}@{stored.version - 1}" if stored.version > 1 else ""
    return RedirectResponse(f"/policies/{stored.name}?version={stored.version}{against}", 303)


@router.post("/{name}/edit/try")
def try_policy(name: str, site: SiteOf, visitor: Operator, document: Document = "") -> Response:
    """Backtest the document on the newest ended runs."""
    try:
        draft = policy_to_document(_read_policy(document))
        backtest = backtests.request_backtest(
            site.database, visitor.project.id, draft, backtests.MOST_RUNS, visitor.actor, site.clock()
        )
    except _REFUSALS as error:
        return _render_editor(site, visitor, name, document, problem=str(error))
    return RedirectResponse(f"/policies/{name}/edit?backtest={backtest.id}", 303)


def _read_policy(text: str) -> Policy:
    try:
        document: Any = load(text.encode())
    except NotJson as error:
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
    revision: str | None = None,
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
        revision=revision,
        figures=backtest and backtests.summarize_findings(backtest.findings),
        most_runs=backtests.MOST_RUNS,
    )
