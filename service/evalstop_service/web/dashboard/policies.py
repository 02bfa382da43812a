"""The pages of policies: their list, one version, and the differences between two."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from evalstop_service.errors import NotFound
from evalstop_service.evaluation import figures
from evalstop_service.projects import policies
from evalstop_service.projects.policies import Version
from evalstop_service.store import backtests, cases, rollout_stages
from evalstop_service.store.cases import CaseFilter
from evalstop_service.web.dashboard import formatting, policy_diff, policy_ladder
from evalstop_service.web.dashboard.responses import PageRoute, render_page
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/policies", route_class=PageRoute)

MOST_BACKTESTS = 10

SETTINGS = {
    "at_least": "weight needed to stop",
    "suspect_at_least": "weight needed to suspect",
    "gate": "required detectors",
    "eval_required": "requires evidence from the eval",
    "min_evals": "evals before a stop",
    "warmup_steps": "steps before a stop",
    "stops_despite": "overridden guards",
    "stop_on": "stops when it has",
    "levelled_off_at": "share of its range covered to have levelled off",
}
"""The fields of a policy other than its members, and their labels."""


@router.get("")
def show_policies(site: SiteOf, visitor: SignedIn) -> Response:
    """The newest version of each policy, its figures, and recent backtests."""
    case_filter = CaseFilter(since=visitor.period.since(site.clock()))
    with site.database.reading() as tx:
        counts = cases.count_cases(tx, visitor.project.id, case_filter, ("policy",))
        stages = {stage.policy_name: stage for stage in rollout_stages.list_stages(tx, visitor.project.id)}
        versions = policies.list_versions(tx, visitor.project.id)
        recent = backtests.list_backtests(tx, visitor.project.id, limit=MOST_BACKTESTS)
    newest: dict[str, Version] = {}
    for version in versions:
        newest.setdefault(version.name, version)
    return render_page(
        "policies.html",
        visitor=visitor,
        measured={group.key: group for group in figures.compute_figures(counts, ())},
        stages=stages,
        newest=list(newest.values()),
        version_counts={name: sum(version.name == name for version in versions) for name in newest},
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
    """One version of a policy, compared with `against` if given."""
    with site.database.reading() as tx:
        versions = policies.list_versions(tx, visitor.project.id)
        ladder = policy_ladder.load_ladder(tx, visitor, site, name)
    policy_versions = [policy for policy in versions if policy.name == name]
    shown = next((policy for policy in policy_versions if version in (None, policy.version)), None)
    if shown is None:
        raise NotFound
    other = next((policy for policy in versions if policy.reference == against), None)
    return render_page(
        "policy.html",
        visitor=visitor,
        shown=shown,
        ladder=ladder,
        requirements=visitor.project.case_requirements,
        versions=policy_versions,
        links={
            policy.version: visitor.link(f"/policies/{name}?version={policy.version}") for policy in policy_versions
        },
        choices=[policy.reference for policy in versions if policy is not shown],
        members=policy_diff.name_members(shown.document),
        settings=SETTINGS,
        text=formatting.format_json(shown.document),
        other=other,
        changes=policy_diff.compare_fields(other.document, shown.document) if other else [],
        lines=policy_diff.compare_lines(other.document, shown.document) if other else [],
    )
