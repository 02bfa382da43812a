"""Labeling mode: shows one run's curve at a time, without what its policy decided, and asks whether it turned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Query, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import commands
from evalstop_service.domain.outcome import judge_decision
from evalstop_service.domain.run import Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment
from evalstop_service.errors import Invalid
from evalstop_service.runs import watched_metrics
from evalstop_service.store import cases, decisions, runs
from evalstop_service.store.cases import CaseFilter, Outcome
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run
from evalstop_service.web.pages import charts, forms
from evalstop_service.web.pages.responses import PageRoute, make_link, render_page
from evalstop_service.web.pages.visitor import Operator, SiteOf

router = APIRouter(prefix="/precision/label", route_class=PageRoute)

_PATH = "/precision/label"

MOST_CASES = 40
_EXAMINED = 3 * MOST_CASES

Skip = Annotated[int, Query(ge=0, le=MOST_CASES)]
"""How many of the cases the visitor left for later."""


@router.get("")
def show_case(
    site: SiteOf, visitor: Operator, policy: str = "", job_kind: str = "", skip: Skip = 0, labeled: UUID | None = None
) -> Response:
    """The next case that nobody has labeled; `labeled`: the run before, whose decision may be seen now."""
    with site.database.reading() as tx:
        waiting = choose_runs(tx, visitor.project.id, forms.select_cases(policy, job_kind))
        shown = waiting[skip] if skip < len(waiting) else None
        curves = charts.load_curves(tx, shown) if shown else []
    chosen = {"policy": policy, "job_kind": job_kind}
    return render_page(
        "labeling.html",
        visitor=visitor,
        shown=shown,
        count=len(waiting),
        labeled=labeled,
        curves=curves,
        lower_is_better=shown is not None and watched_metrics.find_eval_sign(shown) < 0,
        following=make_link(_PATH, {**chosen, "skip": skip + 1}),
        again=make_link(_PATH, chosen),
        action=make_link(f"{_PATH}/{shown.id}", {**chosen, "skip": skip or None}) if shown else None,
    )


@router.post("/{run_id}")
def label_case(
    run_id: UUID,
    site: SiteOf,
    visitor: Operator,
    run_outcome: Annotated[RunOutcome, Form()],
    turn_step: Annotated[str, Form()] = "",
    policy: Annotated[str, Query()] = "",
    job_kind: Annotated[str, Query()] = "",
    skip: Skip = 0,
) -> Response:
    """Label a run, then show the next one."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    step = forms.parse_step(turn_step)
    outcome = judge_outcome(run_outcome, step, decision)
    label = Outcome(outcome=outcome, turn_step=step, note="", actor=visitor.actor, at=site.clock())
    commands.label_run(site.database, visitor.project.id, run.id, label)
    query = {"policy": policy, "job_kind": job_kind, "skip": skip or None, "labeled": run_id}
    return RedirectResponse(make_link(_PATH, query), 303)


def choose_runs(tx: Transaction, project_id: UUID, case_filter: CaseFilter) -> Sequence[Run]:
    """Up to `MOST_CASES` of the newest runs that nobody has labeled and that can be judged from their curve: half of
    them with a stop that was not carried out, half never flagged, in an order that does not reveal which."""
    flagged = _list_curves(tx, project_id, replace(case_filter, treatment=Treatment.OBSERVED))
    passed = _list_curves(tx, project_id, replace(case_filter, flagged=False))
    number = min(len(flagged), max(MOST_CASES // 2, MOST_CASES - len(passed)))
    # The last bytes of an id are random and never change.
    return sorted(flagged[:number] + passed[: MOST_CASES - number], key=lambda run: run.id.bytes[::-1])


def judge_outcome(run_outcome: RunOutcome, turn_step: int | None, decision: Decision | None) -> DecisionOutcome:
    """Whether the decision was right, given a person's label of the run; raises Invalid for a contradiction."""
    if turn_step is not None and run_outcome is not RunOutcome.TURNED:
        raise Invalid("only a run that turned has a turn_step: leave it empty, or label the run turned")
    turn = None if turn_step is None else Turn(turn_step, turn_step)
    return judge_decision(run_outcome, None if decision is None else decision.step, turn)


def _list_curves(tx: Transaction, project_id: UUID, case_filter: CaseFilter) -> list[Run]:
    """The runs of the latest cases that no person has labeled and that can show their whole last attempt."""
    listed = cases.list_cases(tx, project_id, replace(case_filter, derived=True), limit=_EXAMINED)
    present = runs.load_runs(tx, [case.run_id for case in listed])
    decided = decisions.load_decisions(tx, present)
    curves = []
    for case in listed:
        run, decision = present[case.run_id], decided.get(case.run_id)
        whole = run.attempt == case.attempt and run.pruned_at is None and run.last_step is not None
        ordered = decision is not None and decision.ordered
        if whole and not ordered and watched_metrics.find_eval_metric(run) is not None:
            curves.append(run)
    return curves
