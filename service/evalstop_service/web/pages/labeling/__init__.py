"""Labeling mode: shows one run's curve at a time, and hides its policy's decision until the run is labeled."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Form, Query, Response
from fastapi.responses import RedirectResponse
from pydantic import AfterValidator

from evalstop_service.clock import in_utc
from evalstop_service.decisions import commands
from evalstop_service.domain.statuses import RunOutcome
from evalstop_service.errors import NotFound
from evalstop_service.evaluation.cases import MOST_CASES, choose_cases, judge_outcome
from evalstop_service.runs import watched_metrics
from evalstop_service.store import cases, decisions
from evalstop_service.store.cases import CaseFilter
from evalstop_service.web.pages import charts, formatting, forms
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import Operator, SiteOf

router = APIRouter(prefix="/precision/label", route_class=PageRoute)

_PATH = "/precision/label"

ANSWERS = {RunOutcome.TURNED: "turned", RunOutcome.HEALTHY: "healthy", RunOutcome.UNDECIDED: "can’t tell"}
"""The labels that a person can choose."""

Until = Annotated[datetime, AfterValidator(in_utc)]
"""Only cases that ended before this time are in the set, so that it is the same for everyone with the link."""


class Choice:
    """The set of cases to label."""

    def __init__(self, policy: str = "", job_kind: str = "", until: Until | None = None) -> None:
        self.policy, self.job_kind, self.until = policy, job_kind, until

    @property
    def case_filter(self) -> CaseFilter:
        return replace(forms.select_cases(self.policy, self.job_kind), until=self.until)

    def link(self, path: str = _PATH, at: int | None = None) -> str:
        until = formatting.format_iso(self.until) if self.until else None
        return make_link(path, {"policy": self.policy, "job_kind": self.job_kind, "until": until, "at": at})


ChoiceQuery = Annotated[Choice, Depends()]


@router.get("")
def show_case(
    site: SiteOf, visitor: Operator, choice: ChoiceQuery, at: Annotated[int | None, Query(ge=1, le=MOST_CASES)] = None
) -> Response:
    """The case at a position in the set, by default the first that the visitor has not labeled."""
    project_id = visitor.project.id
    with site.database.reading() as tx:
        if choice.until is None:
            newest = cases.list_cases(tx, project_id, choice.case_filter, limit=1)
            if newest:
                choice.until = newest[0].ended_at + timedelta(seconds=1)
                return RedirectResponse(visitor.link(choice.link()), 303)
        chosen = choose_cases(tx, project_id, choice.case_filter)
        unlabeled = [place for place, case in enumerate(chosen, 1) if visitor.actor not in case.labels]
        place = at or next(iter(unlabeled), None)
        if at is not None and at > len(chosen):
            raise NotFound
        shown = chosen[place - 1] if place else None
        curves = charts.load_curves(tx, shown.run) if shown else []
    other_places = [other for other in unlabeled if other != place]
    following = next((other for other in other_places if place and other > place), next(iter(other_places), None))
    return render_page(
        "labeling.html",
        visitor=visitor,
        choice=choice,
        shown=shown,
        place=place,
        number=len(chosen),
        done=len(chosen) - len(unlabeled),
        curves=curves,
        lower_is_better=shown is not None and watched_metrics.find_eval_sign(shown.run) < 0,
        own_label=shown.labels.get(visitor.actor) if shown else None,
        following=visitor.link(choice.link(at=following)),
        answers=ANSWERS,
        action=visitor.link(choice.link(f"{_PATH}/{shown.run.id}", place)) if shown else None,
    )


@router.post("/{run_id}")
def label_case(
    run_id: UUID,
    site: SiteOf,
    visitor: Operator,
    choice: ChoiceQuery,
    run_outcome: Annotated[RunOutcome, Form()],
    turn_step: Annotated[str, Form()] = "",
    at: Annotated[int | None, Query(ge=1, le=MOST_CASES)] = None,
) -> Response:
    """Label a run, then show its case with the decision."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    step = forms.parse_step(turn_step)
    outcome = judge_outcome(run_outcome, step, decision)
    label = commands.Label(outcome, step, "", visitor.actor, site.clock())
    commands.label_run(site.database, visitor.project.id, run.id, label)
    return RedirectResponse(visitor.link(choice.link(at=at)), 303)
