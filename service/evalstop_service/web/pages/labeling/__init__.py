"""Labeling mode: shows one run's curve at a time, and hides its policy's decision until the run is labeled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Form, Query, Response
from fastapi.responses import RedirectResponse
from pydantic import AfterValidator

from evalstop_service.clock import in_utc
from evalstop_service.decisions import commands
from evalstop_service.domain.outcome import judge_decision, read_run_outcome
from evalstop_service.domain.run import Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment
from evalstop_service.errors import Invalid, NotFound
from evalstop_service.runs import watched_metrics
from evalstop_service.store import cases, decisions, runs
from evalstop_service.store.cases import CaseFilter, Outcome
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run
from evalstop_service.web.pages import charts, formatting, forms
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import Operator, SiteOf

router = APIRouter(prefix="/precision/label", route_class=PageRoute)

_PATH = "/precision/label"

MOST_CASES = 40
_EXAMINED = 3 * MOST_CASES

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


@dataclass(frozen=True)
class LabeledCase:
    """A run to be labeled, its decision if it was flagged, and its recorded outcomes, oldest first."""

    run: Run
    decision: Decision | None
    outcomes: Sequence[Outcome]

    @property
    def labels(self) -> dict[str, RunOutcome]:
        """The last label of each person, by name."""
        flagged = self.decision is not None
        return {
            recorded.actor: read_run_outcome(recorded.outcome, recorded.turn_step, flagged=flagged)
            for recorded in self.outcomes
            if not recorded.derived
        }

    @property
    def derived(self) -> Outcome | None:
        """The outcome derived from its later evals, if recorded."""
        return next((recorded for recorded in reversed(self.outcomes) if recorded.derived), None)


def choose_cases(tx: Transaction, project_id: UUID, case_filter: CaseFilter) -> list[LabeledCase]:
    """Up to `MOST_CASES` of the newest cases that can be judged from their curve: half of them stops that were not
    carried out, half never flagged, in an order that does not reveal which. The same for everybody with the same
    filter."""
    flagged = _list_curves(tx, project_id, replace(case_filter, treatment=Treatment.OBSERVED))
    passed = _list_curves(tx, project_id, replace(case_filter, flagged=False))
    number = min(len(flagged), max(MOST_CASES // 2, MOST_CASES - len(passed)))
    chosen = flagged[:number] + passed[: MOST_CASES - number]
    history = cases.load_history(tx, [(run.id, run.attempt) for run, _ in chosen])
    # The last bytes of an id are random and never change.
    ordered = sorted(chosen, key=lambda item: item[0].id.bytes[::-1])
    return [LabeledCase(run, decision, history.get((run.id, run.attempt), ())) for run, decision in ordered]


def judge_outcome(run_outcome: RunOutcome, turn_step: int | None, decision: Decision | None) -> DecisionOutcome:
    """Whether the decision was right, given a person's label of the run; raises Invalid for a contradiction."""
    if turn_step is not None and run_outcome is not RunOutcome.TURNED:
        raise Invalid("only a run that turned has a turn_step: leave it empty, or label the run turned")
    turn = None if turn_step is None else Turn(turn_step, turn_step)
    return judge_decision(run_outcome, None if decision is None else decision.step, turn)


def _list_curves(tx: Transaction, project_id: UUID, case_filter: CaseFilter) -> list[tuple[Run, Decision | None]]:
    """The runs of the newest cases that can show their whole last attempt, with its decision."""
    listed = cases.list_cases(tx, project_id, case_filter, limit=_EXAMINED)
    present = runs.load_runs(tx, [case.run_id for case in listed])
    decided = decisions.load_decisions(tx, present)
    curves = []
    for case in listed:
        run, decision = present.get(case.run_id), decided.get(case.run_id)
        if run is None or (case.decision_id is not None and decision is None):
            continue  # its row or its decision cannot be read
        whole = run.attempt == case.attempt and run.pruned_at is None and run.last_step is not None
        ordered = decision is not None and decision.ordered
        if whole and not ordered and watched_metrics.find_eval_metric(run) is not None:
            curves.append((run, decision))
    return curves
