"""Routes of precision: figures with confidence intervals, and the cases behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from evalstop_service.errors import Invalid
from evalstop_service.evaluation import figures, rollout_stage
from evalstop_service.evaluation.figures import GroupFigures
from evalstop_service.rules.confidence_sequences import ALPHA
from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome, Treatment
from evalstop_service.store import case_counts
from evalstop_service.store.case_counts import CaseFilter, Grouping
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import CaseOut
from evalstop_service.web.api.schemas import Answer, Integral, Line, Name, Page, PolicyName, Time
from evalstop_service.web.context import Db, Read

router = APIRouter(tags=["precision"], route_class=JsonRoute)

MOST_GROUPINGS = 2


class BoundsOut(Answer):
    """The interval with all undecided cases counted as worst and as best."""

    low: float
    high: float


class EstimateOut(Answer):
    """A share with a 95 % confidence interval, valid however often you look; `value` is null without decided cases."""

    value: float | None
    low: float
    high: float
    bounds: BoundsOut
    decided: int
    undecided: int


class DelaysOut(Answer):
    """Steps from the turn to right stops: weighted quartiles."""

    cases: int
    lower: float
    median: float
    upper: float


class HoursOut(Answer):
    """GPU-hours of the cases with a GPU count."""

    since: Time | None = Field(description="when the first flagged attempt ended; null: there is none")
    saved: float = Field(description="by stops that were confirmed or obeyed, and right")
    saved_if_right: float = Field(description="by those whose outcome is unknown: at most so much more was saved")
    lost: float = Field(description="by false stops that were carried out, estimated from held-out stops")
    lost_as_reported: float = Field(description="by stops that were carried out and labeled wrong")
    would_have_saved: float = Field(description="by right stops that were held out or in shadow mode")
    would_have_lost: float = Field(description="by wrong stops that were held out or in shadow mode")
    without_gpus: int = Field(description="flagged cases without a GPU count")


class CellOut(Answer):
    """Numbers of cases by outcome."""

    right: int
    wrong: int
    unknown: int


class CountsOut(Answer):
    """The cases by what was done. The figures count only what was observed or never flagged: of a stop that was carried
    out or prevented the outcome is not seen, by design, and what people say of it is a biased sample."""

    observed: CellOut
    stopped: CellOut
    prevented: CellOut
    passed: CellOut = Field(description="never flagged; `right` is healthy, `wrong` missed")


class GroupOut(Answer):
    """The figures of one group; keys that are not grouped by are null."""

    policy: PolicyName | None
    detector: str | None
    job_kind: str | None = Field(description="also null: jobs without a kind")
    begins: str | None = Field(description="the first day of its day, week (from Monday) or month, in UTC")
    precision: EstimateOut
    recall: EstimateOut | None = Field(description="null by detector")
    false_stops_per_healthy_run: EstimateOut | None
    delay_steps: DelaysOut | None = Field(description="null: no right stop with a known turn")
    gpu_hours: HoursOut
    stated_risk: float | None = Field(description="the share of healthy runs that the policy states it stops")
    counts: CountsOut
    cases: dict[str, dict[str, str]] = Field(description="URLs of the cases behind each count")


class PrecisionOut(Answer):
    """The figures of the project by group."""

    alpha: float = Field(description="the probability that an interval ever fails")
    group_by: list[str]
    groups: list[GroupOut]


class ListedCaseOut(CaseOut):
    """A case with its run and its decision."""

    run_id: UUID
    run_name: str
    attempt: int
    policy: PolicyName
    job_kind: str | None
    decision_id: UUID | None = Field(description="null: it was never flagged")
    decided_step: int | None
    gpus: float | None
    not_counted: str | None = Field(description="why it does not count towards a rollout stage; null: it may count")


class CasePage(Page):
    """Cases, newest first."""

    items: list[ListedCaseOut]


Version = Annotated[int, Field(ge=1, le=2**31 - 1), Integral] | None


def _read_filter(
    policy: Name | None = None,
    version: Version = None,
    detector: Name | None = None,
    job_kind: Line | None = None,
    since: Time | None = None,
    until: Time | None = None,
) -> CaseFilter:
    return CaseFilter(policy, version, detector, job_kind, since, until)


Chosen = Annotated[CaseFilter, Depends(_read_filter)]
"""The cases that figures are made of, and that are listed."""


@router.get("/precision")
def get_precision(
    caller: Read,
    database: Db,
    wanted: Chosen,
    group_by: Annotated[list[Grouping] | None, Query(max_length=MOST_GROUPINGS)] = None,
) -> PrecisionOut:
    """Precision, recall, false stops, delay and GPU-hours with intervals, of all cases or by group."""
    by = list(dict.fromkeys(group_by or []))
    if len({"day", "week", "month"} & set(by)) > 1:
        raise Invalid("group_by names two periods; choose one")
    with database.reading() as tx:
        found = figures.load_figures(tx, caller.project_id, wanted, by)
    return PrecisionOut(alpha=ALPHA, group_by=list(by), groups=[_group(one, wanted, by) for one in found])


@router.get("/cases")
def list_cases(
    caller: Read,
    database: Db,
    chosen: Chosen,
    flagged: bool | None = None,
    treatment: Treatment | None = None,
    outcome: DecisionOutcome | None = None,
    run_outcome: RunOutcome | None = None,
    cursor: Annotated[str, Field(json_schema_extra={"pattern": case_counts.CURSOR})] | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> CasePage:
    """The ended attempts with their decisions and outcomes."""
    wanted = replace(chosen, flagged=flagged, treatment=treatment, outcome=outcome, run_outcome=run_outcome)
    with database.reading() as tx:
        found = case_counts.list_cases(
            tx, caller.project_id, wanted, before=case_counts.parse_cursor(cursor), limit=limit
        )
        reasons = rollout_stage.explain_shortfalls(tx, caller.project_id, found)
    items = [
        ListedCaseOut.model_validate(
            vars(one)
            | {
                "policy": PolicyName(name=one.policy_name, version=one.policy_version),
                "not_counted": reasons.get((one.run_id, one.attempt)),
            }
        )
        for one in found
    ]
    return CasePage(items=items, next_cursor=found[-1].cursor if len(found) == limit else None)


def _group(one: GroupFigures, wanted: CaseFilter, by: list[Grouping]) -> GroupOut:
    named = figures.name_key_parts(one.key, by)
    own = figures.select_group(wanted, by, one.key)
    return GroupOut.model_validate(
        {
            "policy": PolicyName(name=named["policy"], version=named["version"]) if "policy" in named else None,
            "detector": named.get("detector"),
            "job_kind": named.get("job_kind"),
            "begins": named.get("begins"),
            "precision": one.precision,
            "recall": one.recall,
            "false_stops_per_healthy_run": one.false_stops,
            "delay_steps": one.delays,
            "gpu_hours": one.hours,
            "stated_risk": one.stated_risk,
            "counts": one.counts,
            "cases": {
                row: {outcome: _cases_url(figures.select_cell(own, row, outcome)) for outcome in figures.OUTCOMES}
                for row in figures.ROWS
            },
        }
    )


def _cases_url(wanted: CaseFilter) -> str:
    return f"/api/v1/cases?{urlencode(figures.filter_to_query(wanted))}"
