"""The page of precision: was it right? And the cases behind each of its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator

from evalstop_service.clock import in_utc
from evalstop_service.errors import Invalid, NotFound
from evalstop_service.evaluation import figures as measured
from evalstop_service.evaluation.figures import GroupFigures, regroup
from evalstop_service.rules.confidence_sequences import Estimate
from evalstop_service.store import case_counts, policies, rollout_stages
from evalstop_service.store.case_counts import CaseFilter, Delay, Grouping, Key
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.live_updates import Seen, follow
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

PAGE = 50
PERIODS = {"": "all time", "7": "7 days", "30": "30 days", "90": "90 days", "365": "a year"}
MOST_BINS = 24
MOST_VERSIONS = 2**31 - 1

Period = Literal["", "7", "30", "90", "365"]


class Asked:
    """What a visitor wants to see: of which policy, which kind of jobs, and how far back."""

    def __init__(self, site: SiteOf, policy: str = "", job_kind: str = "", days: Period = "") -> None:
        self.policy, self.job_kind, self.days = policy, job_kind, days
        since = site.clock() - timedelta(days=int(days)) if days else None
        # To the hour, so that the links on a page that is rendered again are the same.
        since = since.replace(minute=0, second=0, microsecond=0) if since else None
        self.wanted = CaseFilter(
            policy=forms.printable(policy) or None, job_kind=forms.printable(job_kind) or None, since=since
        )

    def link(self, path: str) -> str:
        said = {"policy": self.policy, "job_kind": self.job_kind, "days": self.days}
        query = urlencode({name: value for name, value in said.items() if value})
        return f"{path}?{query}" if query else path


AskedOf = Annotated[Asked, Depends()]


@router.get("/precision")
def show_precision(site: SiteOf, visitor: SignedIn, asked: AskedOf) -> Response:
    """Precision, recall and false stops, by policy and detector side by side, and what was right and wrong."""
    project_id = visitor.project.id
    with site.database.reading() as tx:
        # Read first: what follows may be newer, never older.
        revision = case_counts.read_revision(tx, project_id)
        flagged = case_counts.count_flagged(tx, project_id, asked.wanted, ("policy", "called"))
        passed = case_counts.count_unflagged(tx, project_id, asked.wanted, ("policy",))
        late = case_counts.count_delays(tx, project_id, asked.wanted, ("policy", "called"))
        kinds = case_counts.list_job_kinds(tx, project_id)
        names = sorted({policy.name for policy in policies.list_policies(tx, project_id)})
        held = {one.policy_name: one for one in rollout_stages.list_stages(tx, project_id)}
    counts = [*flagged, *passed]
    whole = measured.compute_total(counts, late)
    return page(
        "precision.html",
        visitor=visitor,
        asked=asked,
        revision=revision,
        events=asked.link("/precision/events"),
        figures=asked.link("/precision/figures.json"),
        whole=whole,
        by_policy=measured.compute_figures(regroup(counts, _of_policy), regroup(late, _of_policy)),
        by_detector=measured.compute_figures(
            regroup(flagged, _of_detectors), regroup(late, _of_detectors), whole=False
        ),
        policies=names,
        kinds=kinds,
        periods=PERIODS,
        rollout_stages=held,
        any_case=any(sum(cells.values()) for cells in whole.counts.values()),
        cases=lambda one, by, row=None, outcome=None: _cases(asked.wanted, one, by, row, outcome),
        price=visitor.project.price_per_gpu_hour,
        currency=visitor.project.currency,
    )


@router.get("/precision/figures.json")
def show_figures(site: SiteOf, visitor: SignedIn, asked: AskedOf) -> JSONResponse:
    """What the charts draw."""
    with site.database.reading() as tx:
        counts = case_counts.count_cases(tx, visitor.project.id, asked.wanted, ("policy", "week"))
        late = case_counts.count_delays(tx, visitor.project.id, asked.wanted)
    by_week = regroup(counts, lambda key: [key[2:]])
    return JSONResponse(
        {
            "so_far": [_point(one) for one in measured.compute_running_figures(by_week)],
            "weeks": [_point(one) for one in measured.compute_figures(by_week, ())],
            "delays": _bins(late),
            "calibration": [
                {"label": f"v{one.key[1]}", "stated": one.stated_risk, **_ends(one.false_stops)}
                for one in measured.compute_figures(regroup(counts, _of_policy), ())
                if one.stated_risk is not None and one.false_stops is not None and one.false_stops.decided
            ],
        }
    )


@router.get("/precision/events")
def follow_precision(request: Request, site: SiteOf, visitor: SignedIn, asked: AskedOf, seen: Seen) -> Response:
    """Tell whenever a case was added, or turned out otherwise."""
    return follow(request, site, seen, lambda tx: case_counts.read_revision(tx, visitor.project.id))


Moment = Annotated[datetime, AfterValidator(in_utc)]


class Chosen:
    """Which cases a visitor wants to see, as the links of the figures ask for them."""

    def __init__(
        self,
        policy: str = "",
        version: Annotated[int | None, Query(ge=1, le=MOST_VERSIONS)] = None,
        detector: str = "",
        job_kind: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        flagged: bool | None = None,
        treatment: Literal["", "let_run", "stopped", "prevented"] = "",
        outcome: Literal["", "right", "wrong", "unknown"] = "",
    ) -> None:
        self.wanted = CaseFilter(
            forms.printable(policy) or None,
            version,
            forms.printable(detector) or None,
            None if job_kind is None else forms.printable(job_kind),
            since,
            until,
            flagged,
            treatment or None,
            outcome or None,
        )


@router.get("/cases")
def show_cases(
    site: SiteOf, visitor: SignedIn, chosen: Annotated[Chosen, Depends()], cursor: str | None = None
) -> Response:
    """The cases that a figure is made of."""
    try:
        before = case_counts.parse_cursor(cursor)
    except Invalid as error:
        raise NotFound from error
    with site.database.reading() as tx:
        found = case_counts.list_cases(tx, visitor.project.id, chosen.wanted, before=before, limit=PAGE + 1)
    parameters = measured.filter_to_query(chosen.wanted)
    more = {"cursor": found[PAGE - 1].cursor} if len(found) > PAGE else None
    return page(
        "cases.html",
        visitor=visitor,
        cases=found[:PAGE],
        chosen=parameters,
        next_page=more and f"/cases?{urlencode(parameters | more)}",
        first_page=f"/cases?{urlencode(parameters)}" if before else None,
    )


def _cases(
    wanted: CaseFilter, one: GroupFigures, by: tuple[Grouping, ...], row: str | None = None, outcome: str | None = None
) -> str:
    own = measured.select_group(wanted, by, one.key)
    if row is not None and outcome is not None:
        own = measured.select_cell(own, row, outcome)
    elif row is not None:
        own = replace(own, treatment=row)
    return f"/cases?{urlencode(measured.filter_to_query(own))}"


def _of_policy(key: Key) -> list[Key]:
    return [key[:2]]


def _of_detectors(key: Key) -> list[Key]:
    return [(name,) for name in key[2]]


def _point(one: GroupFigures) -> dict[str, Any]:
    figures = {"precision": one.precision, "recall": one.recall, "false_stops": one.false_stops}
    return {"week": one.key[0]} | {name: _ends(found) for name, found in figures.items() if found is not None}


def _ends(found: Estimate) -> dict[str, float | int | None]:
    return {"value": found.value, "low": found.low, "high": found.high, "decided": found.decided}


def _bins(late: Sequence[Delay]) -> dict[str, list[float]]:
    """A histogram: the lower ends of the bins, their width, and the share of all weight in each."""
    if not late:
        return {"from": [], "width": [], "share": []}
    first, last = min(one.steps for one in late), max(one.steps for one in late)
    width = max(1, math.ceil((last - first + 1) / MOST_BINS))
    weights = [0.0] * (1 + (last - first) // width)
    for one in late:
        weights[(one.steps - first) // width] += one.cases / one.probability
    total = sum(weights)
    return {
        "from": [first + width * index for index in range(len(weights))],
        "width": [width] * len(weights),
        "share": [weight / total for weight in weights],
    }
