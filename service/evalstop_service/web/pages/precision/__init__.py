"""The pages of precision: how often stops were right, and the cases behind each figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Response
from msgspec import structs

from evalstop_service.domain.statuses import DecisionOutcome, Treatment
from evalstop_service.evaluation import figures, rollout_stage
from evalstop_service.evaluation.figures import GroupFigures, regroup
from evalstop_service.store import cases, policies, rollout_stages
from evalstop_service.store.cases import CaseFilter, Delay, Grouping, Key
from evalstop_service.web.api.list_filters import ListedCases
from evalstop_service.web.pages import forms
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page, send_json
from evalstop_service.web.pages.visitor import Follow, SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

PAGE = 50
MOST_BINS = 24


class Filters:
    """The filters of the figures: policy, job kind and period."""

    def __init__(self, site: SiteOf, visitor: SignedIn, policy: str = "", job_kind: str = "") -> None:
        self.policy, self.job_kind, self.period = policy, job_kind, visitor.period
        self.case_filter = CaseFilter(
            policy=forms.remove_control_characters(policy) or None,
            job_kind=forms.remove_control_characters(job_kind) or None,
            since=visitor.period.since(site.clock()),
        )

    def link(self, path: str) -> str:
        return self.period.link(make_link(path, {"policy": self.policy, "job_kind": self.job_kind}))

    def link_labels(self) -> str:
        """The address of labeling mode for this policy and job kind."""
        return self.link("/precision/label")


FilterQuery = Annotated[Filters, Depends()]


@router.get("/precision")
def show_precision(site: SiteOf, visitor: SignedIn, filters: FilterQuery) -> Response:
    """Precision, recall and false stops, by policy and by detector."""
    project_id = visitor.project.id
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        revision = cases.read_revision(tx, project_id)
        flagged = cases.count_flagged(tx, project_id, filters.case_filter, ("policy",))
        passed = cases.count_unflagged(tx, project_id, filters.case_filter, ("policy",))
        late = cases.count_delays(tx, project_id, filters.case_filter, ("policy",))
        by_detector = figures.load_detector_figures(tx, project_id, filters.case_filter, ("detector",))
        kinds = cases.list_job_kinds(tx, project_id)
        names = sorted(policies.load_latest_versions(tx, project_id))
        stages = {stage.policy_name: stage for stage in rollout_stages.list_stages(tx, project_id)}
    counts = [*flagged, *passed]
    whole = figures.compute_total(counts, late)
    return render_page(
        "precision.html",
        visitor=visitor,
        filters=filters,
        revision=revision,
        events=filters.link("/precision/events"),
        figures=filters.link("/precision/figures.json"),
        whole=whole,
        by_policy=figures.compute_figures(counts, late),
        by_detector=by_detector,
        policies=names,
        kinds=kinds,
        rollout_stages=stages,
        any_case=any(sum(cells.values()) for cells in whole.counts.values()),
        cases=lambda group, by, row=None, outcome=None: visitor.link(
            _link_cases(filters.case_filter, group, by, row, outcome)
        ),
        price=visitor.project.price_per_gpu_hour,
        currency=visitor.project.currency,
    )


@router.get("/precision/figures.json")
def show_figures(site: SiteOf, visitor: SignedIn, filters: FilterQuery) -> Response:
    """The data of the charts."""
    with site.database.reading() as tx:
        counts = cases.count_cases(tx, visitor.project.id, filters.case_filter, ("policy", "week"))
        late = cases.count_delays(tx, visitor.project.id, filters.case_filter)
    by_week = regroup(counts, lambda key: [key[2:]])
    return send_json(
        {
            "running": [_encode_week(group) for group in figures.compute_running_figures(by_week)],
            "weeks": [_encode_week(group) for group in figures.compute_figures(by_week, ())],
            "delays": _build_histogram(late),
            "calibration": [
                {
                    "label": f"{group.key[0]} v{group.key[1]}",
                    "stated": group.stated_risk,
                    **structs.asdict(group.false_stops),
                }
                for group in figures.compute_figures(regroup(counts, _policy_key), ())
                if group.stated_risk is not None and group.false_stops is not None and group.false_stops.decided
            ],
        }
    )


@router.get("/precision/events")
def follow_precision(visitor: SignedIn, follow: Follow) -> Response:
    """Send an event whenever a case was added or changed."""
    return follow(lambda tx: cases.read_revision(tx, visitor.project.id))


@router.get("/cases")
def show_cases(site: SiteOf, visitor: SignedIn, case_filter: ListedCases, cursor: str | None = None) -> Response:
    """The cases behind a figure."""
    before = cases.parse_cursor(cursor)
    with site.database.reading() as tx:
        listed = cases.list_cases(tx, visitor.project.id, case_filter, before=before, limit=PAGE + 1)
        not_counted = rollout_stage.explain_shortfalls(tx, visitor.project.id, listed)
    parameters = figures.filter_to_query(case_filter)
    after = {"cursor": listed[PAGE - 1].cursor} if len(listed) > PAGE else None
    return render_page(
        "cases.html",
        visitor=visitor,
        cases=listed[:PAGE],
        not_counted=not_counted,
        filters=parameters,
        next_page=after and visitor.link(f"/cases?{urlencode(parameters | after)}"),
        first_page=visitor.link(f"/cases?{urlencode(parameters)}") if before else None,
    )


def _link_cases(
    case_filter: CaseFilter,
    group: GroupFigures,
    by: tuple[Grouping, ...],
    row: str | None,
    outcome: DecisionOutcome | None,
) -> str:
    group_filter = figures.select_group(case_filter, by, group.key)
    if row is not None and outcome is not None:
        group_filter = figures.select_cell(group_filter, row, outcome)
    elif row is not None:
        group_filter = replace(group_filter, treatment=Treatment(row))
    return f"/cases?{urlencode(figures.filter_to_query(group_filter))}"


def _policy_key(key: Key) -> list[Key]:
    return [key[:2]]


def _encode_week(group: GroupFigures) -> dict[str, Any]:
    estimates = {"precision": group.precision, "recall": group.recall, "false_stops": group.false_stops}
    return {"week": group.key[0], **estimates}


def _build_histogram(late: Sequence[Delay]) -> dict[str, list[float]]:
    """A histogram: the lower end, the width and the share of the total weight of each bin."""
    if not late:
        return {"from": [], "width": [], "share": []}
    first, last = min(delay.steps for delay in late), max(delay.steps for delay in late)
    width = max(1, math.ceil((last - first + 1) / MOST_BINS))
    weights = [0.0] * (1 + (last - first) // width)
    for delay in late:
        weights[(delay.steps - first) // width] += delay.cases / delay.probability
    total = sum(weights)
    return {
        "from": [first + width * index for index in range(len(weights))],
        "width": [width] * len(weights),
        "share": [weight / total for weight in weights],
    }
