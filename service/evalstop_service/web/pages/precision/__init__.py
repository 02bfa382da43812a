"""The pages of precision: how often stops were right, and the cases behind each figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Response

from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment
from evalstop_service.evaluation import figures, rollout_stage
from evalstop_service.evaluation.figures import GroupFigures
from evalstop_service.store import cases, decisions, policies, rollout_stages, runs
from evalstop_service.store.cases import CaseCount, CaseFilter
from evalstop_service.store.database import Transaction
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.web.api.list_filters import ListedCaseQuery
from evalstop_service.web.pages import charts, forms
from evalstop_service.web.pages.formatting import suggest_name
from evalstop_service.web.pages.responses import Days, PageRoute, find_beginning, make_link, render_page, send_json
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(route_class=PageRoute)

PAGE = 50


class Filters:
    """The filters of the figures: NAME or NAME@VERSION of a policy, job kind and period."""

    def __init__(self, site: SiteOf, policy: str = "", job_kind: str = "", days: Days = "") -> None:
        self.policy, self.job_kind, self.days = policy, job_kind, days
        self.case_filter = forms.select_cases(policy, job_kind, since=find_beginning(days, site.clock()))

    def choose_version(self, name: str, version: int) -> None:
        """Choose a version of a policy."""
        self.policy = f"{name}@{version}"
        self.case_filter = figures.select_version(self.case_filter, (name, version))

    def link(self, path: str) -> str:
        return make_link(path, {"policy": self.policy, "job_kind": self.job_kind, "days": self.days})


FilterQuery = Annotated[Filters, Depends()]


@dataclass(frozen=True)
class Panel:
    """The detectors of one version of a policy, all measured on its runs; those that can stop a run first."""

    policy: str
    version: int
    is_enforced: bool
    rows: Sequence[GroupFigures]

    @property
    def decides(self) -> str:
        """The first detector that can stop a run."""
        return next((str(row.key[-1]) for row in self.rows if not row.observes), "")


def load_panels(
    tx: Transaction,
    project_id: UUID,
    case_filter: CaseFilter,
    by_policy: Sequence[GroupFigures],
    counts: Iterable[CaseCount],
) -> list[Panel]:
    """The panels of these versions of policies, in their order; `counts`: of cases, by policy."""
    if len(by_policy) == 1:
        case_filter = figures.select_version(case_filter, by_policy[0].key)
    shown = {group.key for group in by_policy}
    counted = [count for count in counts if count.key in shown]
    loaded = figures.load_figures(tx, project_id, case_filter, ["policy", "detector"], counted)
    rows = {row.key: row for row in loaded}
    stages = rollout_stages.load_stages(tx, project_id)
    panels = []
    for group in by_policy:
        name, version = group.key
        able = figures.load_panel(tx, project_id, name, version, callers=True)
        detectors = [rows[name, version, item] for item in able if (name, version, item) in rows]
        detectors.sort(key=_count_calls, reverse=True)
        panels.append(Panel(name, version, is_enforced(group, stages), detectors))
    return panels


def _count_calls(row: GroupFigures) -> float:
    """The calls of an observer; those with a say come before all observers."""
    return sum(row.counts[Treatment.OBSERVED].values()) if row.observes else math.inf


def rank_policies(by_policy: Iterable[GroupFigures], stages: Mapping[str, RolloutStage]) -> list[GroupFigures]:
    """Versions of policies: those whose stops are carried out first, then by their number of cases."""

    def rank(group: GroupFigures) -> tuple[bool, int]:
        return is_enforced(group, stages), sum(sum(cells.values()) for cells in group.counts.values())

    return sorted(by_policy, key=rank, reverse=True)


def is_enforced(group: GroupFigures, stages: Mapping[str, RolloutStage]) -> bool:
    """Whether the stops of a version of a policy are carried out: by its rollout stage, else by past stops."""
    name, version = group.key
    if name in stages:
        return rollout_stage.get_enforced_share(stages[name], version) > 0
    return any(group.counts[Treatment.STOPPED].values())


@router.get("/precision")
def show_precision(site: SiteOf, visitor: SignedIn, filters: FilterQuery) -> Response:
    """The detectors of each policy, and the precision, recall and false stops of one policy, by default the first
    whose stops are carried out."""
    project_id = visitor.project.id
    with site.database.reading() as tx:
        # Read first, so that what follows is never older than the revision.
        revision = cases.read_revision(tx, project_id)
        if visitor.seen == revision:
            return Response(status_code=204)
        counts = cases.count_cases(tx, project_id, filters.case_filter, ("policy",))
        stages = rollout_stages.load_stages(tx, project_id)
        by_policy = rank_policies(figures.compute_figures(counts), stages)
        panels = load_panels(tx, project_id, filters.case_filter, by_policy, counts)
        kinds = cases.list_job_kinds(tx, project_id)
        versions = policies.load_latest_versions(tx, project_id)
    if not filters.policy and by_policy:  # no figure mixes several, unless the visitor asks for that
        filters.choose_version(*by_policy[0].key)
        whole = replace(by_policy[0], key=())
    else:
        whole = figures.compute_total(counts)
    return render_page(
        "precision.html",
        visitor=visitor,
        filters=filters,
        revision=revision,
        figures=filters.link("/precision/figures.json"),
        panels=panels,
        whole=whole,
        by_policy=by_policy,
        policies=_list_choices(versions, filters.policy),
        mistake=suggest_name("policy", filters.case_filter.policy, versions),
        kinds=kinds,
        rollout_stages=stages,
        any_case=any(sum(cells.values()) for cells in whole.counts.values()),
        cases=partial(_link_cases, filters.case_filter),
        link_calls=partial(link_calls, filters.case_filter),
    )


def _list_choices(versions: Mapping[str, int], chosen: str) -> dict[str, str]:
    """The policies to choose from, by their parameter: the newest versions, and all versions of one together."""
    choices = {}
    for name, version in sorted(versions.items()):
        choices[f"{name}@{version}"] = f"{name} v{version}"
        if version > 1 or chosen == name:
            choices[name] = f"{name}, all versions"
    return choices if not chosen or chosen in choices else {chosen: chosen.replace("@", " v")} | choices


def link_calls(case_filter: CaseFilter, panel: Panel, detector: str, **chosen: str) -> str:
    """The address of the cases where a detector called: with an `outcome`, or while another one was `silent`."""
    of_version = {"policy": panel.policy, "version": panel.version, "detector": detector}
    parameters = figures.filter_to_query(case_filter) | of_version | chosen
    return f"/cases?{urlencode(parameters)}"


@router.get("/precision/figures.json")
def show_figures(site: SiteOf, visitor: SignedIn, filters: FilterQuery) -> Response:
    """The data of the charts: the stops of a policy, and the detectors of its first version."""
    project_id, chosen = visitor.project.id, filters.case_filter
    with site.database.reading() as tx:
        counts = cases.count_cases(tx, project_id, chosen, ("policy", "week"))
        by_week = figures.merge_groups(counts, slice(2, None))
        by_policy = figures.compute_figures(figures.merge_groups(counts, slice(2)))
        first = rank_policies(by_policy, rollout_stages.load_stages(tx, project_id))[:1]
        version = figures.select_version(chosen, first[0].key) if first else chosen
        of_version = [count for count in counts if count.key[:2] == first[0].key]
        detectors = figures.load_detectors_by_week(tx, project_id, version, of_version)
        callers = figures.load_panel(tx, project_id, *first[0].key, callers=True) if first else {}
    return send_json(
        {
            "running": [_encode_week(group) for group in figures.compute_running_figures(by_week)],
            "weeks": [_encode_week(group) for group in figures.compute_figures(by_week)],
            "detectors": [
                {"name": name, "observes": observes, "running": [_encode_week(group) for group in detectors[name]]}
                for name, observes in callers.items()
                if name in detectors
            ],
        }
    )


@router.get("/cases")
def show_cases(site: SiteOf, visitor: SignedIn, query: Annotated[ListedCaseQuery, Query()]) -> Response:
    """The cases behind a figure."""
    case_filter = query.to_filter()
    with site.database.reading() as tx:
        listed = cases.list_cases(tx, visitor.project.id, case_filter, before=query.cursor, limit=PAGE + 1)
        shown = runs.load_runs(tx, list({case.run_id for case in listed[:PAGE]}))
        sparks = charts.draw_sparklines(tx, list(shown.values()), decisions.load_decisions(tx, shown))
        disagreed = Counter[RunOutcome | None]()
        if case_filter.detector and case_filter.silent:
            for count in cases.count_cases(tx, visitor.project.id, case_filter):
                disagreed[count.run_outcome] += count.cases
    parameters = figures.filter_to_query(case_filter)
    after = {"cursor": str(listed[PAGE - 1].revision)} if len(listed) > PAGE else None
    return render_page(
        "cases.html",
        visitor=visitor,
        cases=listed[:PAGE],
        chosen=case_filter,
        disagreed=disagreed,
        sparks=sparks,
        filters=parameters,
        next_page=after and f"/cases?{urlencode(parameters | after)}",
        first_page=f"/cases?{urlencode(parameters)}" if query.cursor else None,
    )


def _link_cases(
    case_filter: CaseFilter,
    group: GroupFigures,
    row: str | None = None,
    outcome: DecisionOutcome | None = None,
) -> str:
    group_filter = figures.select_version(case_filter, group.key)
    if row is not None and outcome is not None:
        group_filter = figures.select_cell(group_filter, row, outcome)
    elif row is not None:
        group_filter = replace(group_filter, treatment=Treatment(row))
    return f"/cases?{urlencode(figures.filter_to_query(group_filter))}"


def _encode_week(group: GroupFigures) -> dict[str, Any]:
    estimates = {"precision": group.precision, "recall": group.recall, "false_stops": group.false_stops}
    return {"week": group.key[0], **estimates}
