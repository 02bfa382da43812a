"""The pages of policies: what there is, what each says, and how two of them differ."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response

from evalstop_service.errors import NotFound
from evalstop_service.evaluation.backtests import MOST_RUNS
from evalstop_service.projects import policies
from evalstop_service.projects.policies import Version
from evalstop_service.store import backtests
from evalstop_service.web.dashboard import policy_diff
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/policies", route_class=PageRoute)

MOST_BACKTESTS = 10

SETTINGS = {
    "at_least": "stops when the weights of those that call for it reach",
    "suspect_at_least": "suspects when they reach",
    "gate": "no stop without",
    "eval_required": "needs evidence from gold",
    "min_evals": "no stop before so many evals",
    "warmup_steps": "no stop before step",
    "stops_despite": "stops despite",
}
"""What a policy says beside its members, in words."""


@router.get("")
def show_policies(site: SiteOf, visitor: SignedIn) -> Response:
    """Each policy by its newest version, and the backtests of late."""
    with site.database.reading() as tx:
        versions = policies.listing(tx, visitor.project.id)
        recent = backtests.list_backtests(tx, visitor.project.id, limit=MOST_BACKTESTS)
    newest: dict[str, Version] = {}
    for version in versions:
        newest.setdefault(version.name, version)
    return page(
        "policies.html",
        visitor=visitor,
        newest=list(newest.values()),
        counts={name: sum(version.name == name for version in versions) for name in newest},
        recent=recent,
    )


@router.get("/{name}")
def show_policy(
    name: str,
    site: SiteOf,
    visitor: SignedIn,
    version: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    against: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    """One version of a policy, beside another one if it is to be compared."""
    with site.database.reading() as tx:
        versions = policies.listing(tx, visitor.project.id)
    own = [one for one in versions if one.name == name]
    shown = next((one for one in own if version in (None, one.version)), None)
    if shown is None:
        raise NotFound
    other = next((one for one in versions if one.reference == against), None)
    return page(
        "policy.html",
        visitor=visitor,
        shown=shown,
        versions=own,
        links={one.version: f"/policies/{name}?{urlencode({'version': one.version})}" for one in own},
        choices=[one.reference for one in versions if one is not shown],
        members=policy_diff.named_members(shown.document),
        settings=SETTINGS,
        text=policy_diff.pretty(shown.document),
        other=other,
        changes=policy_diff.fields(other.document, shown.document) if other else [],
        lines=policy_diff.lines(other.document, shown.document) if other else [],
        most_runs=MOST_RUNS,
    )
