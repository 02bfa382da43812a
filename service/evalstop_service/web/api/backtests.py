"""Routes of backtests: a policy replayed on past runs."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query
from pydantic import Field

from evalstop_service.errors import NotFound
from evalstop_service.evaluation import backtests
from evalstop_service.projects import policies
from evalstop_service.rules.run_results import Call
from evalstop_service.rules.statuses import BacktestState, DecisionOutcome, RunOutcome
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.store.backtests import Backtest
from evalstop_service.web.api.examples import POLICY_DOCUMENT
from evalstop_service.web.api.policies import PolicyDocument
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import make_cursor
from evalstop_service.web.api.schemas import Answer, Body, Cursor, Integral, Page, Plain, Time
from evalstop_service.web.context import Db, Now, Operate, Read

router = APIRouter(prefix="/policies/backtests", tags=["policies"], route_class=JsonRoute)


class BacktestIn(Body):
    """A policy, and how many of the newest ended runs to replay."""

    policy: Annotated[str, Field(max_length=100), Plain] | PolicyDocument = Field(
        description="NAME, NAME@VERSION, or a document that need not be stored",
        examples=["cautious", POLICY_DOCUMENT],
    )
    runs: Annotated[int, Field(ge=1, le=backtests.MOST_RUNS), Integral] = Field(
        backtests.MOST_RUNS, description="how many of the newest ended runs to replay"
    )


class BacktestRunOut(Answer):
    """The verdict of the policy on one run, beside the recorded decision and outcome."""

    run_id: UUID = Field(description="the replayed run")
    run_name: str = Field(description="as people know it")
    status: str = Field(description="how the run ended")
    last_step: int | None = Field(description="the highest step with an observation; null: there is none")
    policy: str = Field(description="the policy of the run, as NAME@VERSION")
    decision_id: UUID | None = Field(description="the decision on record; null: there was none")
    decided_step: int | None = Field(description="the step of the decision on record")
    state: str | None = Field(description="of the decision on record")
    run_outcome: RunOutcome | None = Field(description="whether its eval had turned by its end; null: not assessed")
    turn_step: int | None = Field(description="where its eval turned; null: it did not, or nobody knows")
    verdict: Call = Field(description="the last verdict of the replayed policy")
    step: int | None = Field(description="where the policy would have stopped the run; null: never")
    reason: str = Field(description="the reason of that verdict")
    outcome: DecisionOutcome = Field(description="of what the policy would have done")
    hours_after: float | None = Field(description="GPU-hours that the run spent after `step`; null: not known")
    error: str | None = Field(description="why the run could not be replayed")


class BacktestSummaryOut(Answer):
    """The findings counted; see `evaluation.backtests.Summary`."""

    runs: int = Field(description="replayed so far")
    stops: int = Field(description="runs that the policy would have stopped")
    right: int = Field(description="of these stops, those of runs that had turned")
    wrong: int = Field(description="of these stops, those of healthy runs")
    unknown: int = Field(description="of these stops, those of runs whose outcome is not known")
    missed: int = Field(description="runs that turned and that it would have let go on")
    decided: int = Field(description="stops that are on record")
    only_policy: int = Field(description="runs that it would have stopped and that were not to be stopped")
    only_recorded: int = Field(description="runs that were to be stopped and that it would have let go on")
    hours_after: float = Field(description="GPU-hours after those of its stops that were right")
    hours_wrong: float = Field(description="GPU-hours after those of its stops that were wrong")
    stops_without_gpus: int = Field(description="stops whose GPU-hours are not known")
    failed: int = Field(description="runs that could not be replayed")


class BacktestOut(Answer):
    """A backtest and its progress; `summary` and `findings` are left out of lists."""

    id: UUID = Field(description="to read it again by")
    state: BacktestState = Field(description="waiting, running, done or failed")
    document: dict[str, Any] = Field(
        description="the policy that is replayed, with every number written out", examples=[POLICY_DOCUMENT]
    )
    most_runs: int = Field(description="how many runs were asked for")
    total: int = Field(description="runs to replay; 0 until it has started")
    done: int = Field(description="runs replayed so far")
    actor: str = Field(description="who asked for it")
    created_at: Time = Field(description="when it was asked for")
    ended_at: Time | None = Field(description="when its last run was replayed; null: not yet")
    summary: BacktestSummaryOut | None = Field(None, description="counts over all findings")
    findings: list[BacktestRunOut] | None = Field(None, description="those that differ from decisions first")


class BacktestPage(Page):
    """Backtests, newest first."""

    items: list[BacktestOut] = Field(description="newest first")


@router.get("")
def list_backtests(
    caller: Read,
    database: Db,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=100, description="the most items of a page")] = 20,
) -> BacktestPage:
    """The project's backtests, newest first."""
    with database.reading() as tx:
        found = backtest_rows.list_backtests(tx, caller.project_id, before=cursor, limit=limit)
    items = [BacktestOut.model_validate(vars(one) | {"findings": None}) for one in found]
    return BacktestPage(items=items, next_cursor=make_cursor(found, limit))


@router.post("", status_code=202)
def create_backtest(body: BacktestIn, caller: Operate, database: Db, now: Now) -> BacktestOut:
    """Start a backtest on the newest ended runs; a worker runs it in the background."""
    if isinstance(body.policy, str):
        with database.reading() as tx:
            document = policies.find_referred_policy(tx, caller.project_id, body.policy).document
    else:
        document = body.policy.root
    return _out(backtests.request_backtest(database, caller.project_id, document, body.runs, caller.actor, now))


@router.get("/{backtest_id}")
def get_backtest(
    backtest_id: Annotated[UUID, Path(description="`id` of the backtest, as it was created or listed")],
    caller: Read,
    database: Db,
) -> BacktestOut:
    """The progress and the findings so far."""
    with database.reading() as tx:
        found = backtest_rows.find_backtest(tx, caller.project_id, backtest_id)
    if found is None:
        raise NotFound(f"there is no backtest {backtest_id} in this project")
    return _out(found)


def _out(backtest: Backtest) -> BacktestOut:
    details = {
        "summary": vars(backtests.summarize_findings(backtest.findings)),
        "findings": backtests.sort_findings(backtest.findings),
    }
    return BacktestOut.model_validate(vars(backtest) | details)
