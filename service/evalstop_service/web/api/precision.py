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
from evalstop_service.web.api.schemas import Answer, Integral, Limit, Line, Name, Page, PolicyName, Time
from evalstop_service.web.context import Db, Read

router = APIRouter(tags=["precision"], route_class=JsonRoute)

MOST_GROUPINGS = 2


class BoundsOut(Answer):
    """The interval with all undecided cases counted as worst and as best."""

    low: float = Field(description="the lower end if all undecided cases turn out badly")
    high: float = Field(description="the upper end if all undecided cases turn out well")


class EstimateOut(Answer):
    """A share with a 95 % confidence interval, valid however often you look; `value` is null without decided cases."""

    value: float | None = Field(description="the estimate, from 0 to 1; null: nothing to estimate it from")
    low: float = Field(description="the lower end of its confidence interval")
    high: float = Field(description="the upper end of its confidence interval")
    bounds: BoundsOut = Field(description="the interval with the undecided cases counted either way")
    decided: int = Field(description="cases with a known outcome")
    undecided: int = Field(description="cases without one")


class DelaysOut(Answer):
    """Steps from the turn to right stops: weighted quartiles."""

    cases: int = Field(description="right stops with a known turn")
    lower: float = Field(description="a quarter of them came within so many steps")
    median: float = Field(description="half of them came within so many steps")
    upper: float = Field(description="three quarters of them came within so many steps")


class HoursOut(Answer):
    """GPU-hours of the cases with a GPU count."""

    since: Time | None = Field(description="when the first flagged attempt ended; null: there is none")
    saved: float = Field(description="by stops that were confirmed or obeyed, and right")
    saved_if_right: float = Field(description="by those whose outcome is unknown: at most so much more was saved")
    lost: float = Field(description="by false stops that were carried out, estimated from held-out stops")
    lost_as_reported: float = Field(description="by stops that were carried out and labeled wrong")
    would_have_saved: float = Field(description="by right stops that were held out or in shadow mode")
    would_have_lost: float = Field(description="by wrong stops that were held out or in shadow mode")
    parked: float = Field(description="given up to others while jobs were parked")
    without_gpus: int = Field(description="flagged cases without a GPU count")


class ParksOut(Answer):
    """Jobs that were parked, and what that cost those that went on."""

    cases: int = Field(description="attempts whose job was parked")
    went_on: int = Field(description="those that returned, or came to their end on idle GPUs")
    delay_hours: float = Field(description="for how many hours those were parked in all")


class CellOut(Answer):
    """Numbers of cases by outcome."""

    right: int = Field(description="stops of runs that had turned")
    wrong: int = Field(description="stops of healthy runs")
    unknown: int = Field(description="without a known outcome")


class CountsOut(Answer):
    """The cases by what was done. The figures count only what was observed or never flagged: of a stop that was carried
    out or prevented the outcome is not seen, by design, and what people say of it is a biased sample."""

    observed: CellOut = Field(description="flagged and left to run: in shadow mode or held out")
    stopped: CellOut = Field(description="flagged, and the stop was carried out")
    prevented: CellOut = Field(description="flagged, and the stop did not happen: vetoed, undone, failed or too late")
    passed: CellOut = Field(description="never flagged; `right` is healthy, `wrong` missed")


class GroupOut(Answer):
    """The figures of one group; keys that are not grouped by are null."""

    policy: PolicyName | None = Field(description="null unless grouped by policy")
    detector: str | None = Field(description="null unless grouped by detector")
    job_kind: str | None = Field(description="also null: jobs without a kind")
    begins: str | None = Field(description="the first day of its day, week (from Monday) or month, in UTC")
    precision: EstimateOut = Field(description="the share of its stops that were right")
    recall: EstimateOut | None = Field(description="null by detector")
    false_stops_per_healthy_run: EstimateOut | None = Field(
        description="the share of healthy runs that it flagged; null by detector"
    )
    delay_steps: DelaysOut | None = Field(description="null: no right stop with a known turn")
    gpu_hours: HoursOut = Field(description="what its stops saved and cost")
    parks: ParksOut = Field(description="the jobs that it parked instead")
    stated_risk: float | None = Field(description="the share of healthy runs that the policy states it stops")
    counts: CountsOut = Field(description="how many cases there are of each kind")
    cases: dict[str, dict[str, str]] = Field(description="URLs of the cases behind each count")


class PrecisionOut(Answer):
    """The figures of the project by group."""

    alpha: float = Field(description="the probability that an interval ever fails")
    group_by: list[str] = Field(description="as it was asked for")
    groups: list[GroupOut] = Field(description="one of all cases, or one for each group")


class ListedCaseOut(CaseOut):
    """A case with its run and its decision."""

    run_id: UUID = Field(description="the run of the attempt")
    run_name: str = Field(description="as people know it")
    attempt: int = Field(description="the attempt of the run")
    policy: PolicyName = Field(description="the policy that judged it")
    job_kind: str | None = Field(description="the label job_kind of the run; null: it has none")
    decision_id: UUID | None = Field(description="null: it was never flagged")
    decided_step: int | None = Field(
        description="the step at which the stop was called for; null: it was never flagged"
    )
    gpus: float | None = Field(description="the label gpus of the run; null: it has none")
    not_counted: str | None = Field(description="why it does not count towards a rollout stage; null: it may count")


class CasePage(Page):
    """Cases, newest first."""

    items: list[ListedCaseOut] = Field(description="those that ended last first")


Version = Annotated[int, Field(ge=1, le=2**31 - 1), Integral] | None


def _read_filter(
    policy: Annotated[Name | None, Query(description="the name of the policy")] = None,
    version: Annotated[Version, Query(description="of the policy")] = None,
    detector: Annotated[Name | None, Query(description="one that called for the stop")] = None,
    job_kind: Annotated[Line | None, Query(description="the label job_kind of the run; empty: without one")] = None,
    since: Annotated[Time | None, Query(description="ended at this time or later")] = None,
    until: Annotated[Time | None, Query(description="ended before this time")] = None,
) -> CaseFilter:
    return CaseFilter(policy, version, detector, job_kind, since, until)


Chosen = Annotated[CaseFilter, Depends(_read_filter)]
"""The cases that figures are made of, and that are listed."""


@router.get("/precision")
def get_precision(
    caller: Read,
    database: Db,
    wanted: Chosen,
    group_by: Annotated[
        list[Grouping] | None,
        Query(max_length=MOST_GROUPINGS, description="what each group has in common; by default one group"),
    ] = None,
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
    flagged: Annotated[bool | None, Query(description="whether the policy called for a stop")] = None,
    treatment: Annotated[Treatment | None, Query(description="what was done about the stop")] = None,
    outcome: Annotated[
        DecisionOutcome | None, Query(description="of the decision to stop it, or of letting it run")
    ] = None,
    run_outcome: Annotated[RunOutcome | None, Query(description="of its eval")] = None,
    cursor: Annotated[
        Annotated[str, Field(json_schema_extra={"pattern": case_counts.CURSOR})] | None,
        Query(description="`next_cursor` of the page before; by default the first page"),
    ] = None,
    limit: Limit = 50,
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
            "parks": one.parks,
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
