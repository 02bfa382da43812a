"""Routes of precision: figures with confidence intervals, and the cases behind them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import Field

from evalstop_service.domain.confidence_sequences import ALPHA
from evalstop_service.evaluation import figures
from evalstop_service.evaluation.figures import Delays, GroupFigures, Hours
from evalstop_service.store import cases
from evalstop_service.store.cases import Case, Grouping
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.list_filters import CaseQuery, ListedCaseQuery
from evalstop_service.web.api.run_views import CaseOut
from evalstop_service.web.api.schemas import Answer, EstimateOut, Page, PolicyName, answers
from evalstop_service.web.context import Db, Read

router = create_router("precision")

MOST_GROUPINGS = 2


@answers(Delays)
class DelaysOut(Answer):
    """Steps from the turn to right stops: weighted quartiles."""


@answers(Hours)
class HoursOut(Answer):
    """GPU-hours of the cases with a GPU count."""


class CellOut(Answer):
    """Numbers of cases by outcome."""

    right: int = Field(description="stops of runs that had turned")
    wrong: int = Field(description="stops of healthy runs")
    unknown: int = Field(description="cases with an unknown outcome")


class CountsOut(Answer):
    """The cases by what was done. The figures count only what was observed or never flagged: the
    outcome of a stop that was carried out or prevented cannot be observed, and people's labels are a biased sample."""

    observed: CellOut = Field(description="flagged and left to run: in shadow mode or held out")
    stopped: CellOut = Field(description="flagged, and the stop was carried out")
    prevented: CellOut = Field(description="flagged, and the stop did not happen: vetoed, undone, failed or too late")
    passed: CellOut = Field(description="never flagged; `right` is healthy, `wrong` missed")


@answers(GroupFigures)
class GroupOut(Answer):
    """The figures of one group; keys that do not define the group are null."""

    policy: PolicyName | None = Field(description="null unless grouped by policy")
    detector: str | None = Field(description="null unless grouped by detector")
    job_kind: str | None = Field(description="null also for jobs without a kind")
    begins: str | None = Field(description="the Monday of its week, in UTC")
    recall: EstimateOut | None = Field(description="the share of the runs that turned that it stopped, rightly")
    false_stops_per_healthy_run: EstimateOut | None = Field(description="the share of healthy runs that it flagged")
    delay_steps: DelaysOut | None = Field(description="null: no right stop with a known turn")
    gpu_hours: HoursOut = Field(description="GPU-hours that its stops saved, would have saved, and lost")
    counts: CountsOut = Field(description="how many cases there are of each kind")


class PrecisionOut(Answer):
    """The figures of the project by group."""

    alpha: float = Field(description="the probability that an interval ever fails")
    group_by: list[str] = Field(description="the requested keys")
    groups: list[GroupOut] = Field(description="one for all cases, or one per group")


@answers(Case)
class ListedCaseOut(CaseOut):
    """A case with its run and its decision."""

    run_name: str = Field(description="the run's name")
    policy: PolicyName = Field(description="the policy that judged it")


class PrecisionQuery(CaseQuery):
    """Which cases to count, and by what."""

    group_by: list[Grouping] = Field([], max_length=MOST_GROUPINGS, description="keys to group by; default: one group")


@router.get("/precision")
def get_precision(caller: Read, database: Db, query: Annotated[PrecisionQuery, Query()]) -> PrecisionOut:
    """Precision, recall, false stops, delay and GPU-hours with intervals, of all cases or by group."""
    by = list(dict.fromkeys(query.group_by))
    with database.reading() as tx:
        groups = figures.load_figures(tx, caller.project_id, query.to_filter(), by)
    return PrecisionOut(alpha=ALPHA, group_by=list(by), groups=[_view_group(group, by) for group in groups])


@router.get("/cases")
def list_cases(caller: Read, database: Db, query: Annotated[ListedCaseQuery, Query()]) -> Page[ListedCaseOut]:
    """The ended attempts with their decisions and outcomes, those that ended or were labeled last first."""
    with database.reading() as tx:
        listed = cases.list_cases(tx, caller.project_id, query.to_filter(), before=query.cursor, limit=query.limit)
    items = [
        ListedCaseOut.model_validate(
            vars(case) | {"hours": case.hours, "policy": PolicyName(name=case.policy_name, version=case.policy_version)}
        )
        for case in listed
    ]
    following = str(listed[-1].revision) if len(listed) == query.limit else None
    return Page[ListedCaseOut](items=items, next_cursor=following)


def _view_group(group: GroupFigures, by: list[Grouping]) -> GroupOut:
    parts = dict.fromkeys(("detector", "job_kind", "begins")) | figures.name_key_parts(group.key, by)
    return GroupOut.model_validate(
        parts
        | vars(group)
        | {
            "policy": PolicyName(name=parts["policy"], version=parts["version"]) if "policy" in parts else None,
            "false_stops_per_healthy_run": group.false_stops,
            "delay_steps": group.delays,
            "gpu_hours": group.hours,
        }
    )
