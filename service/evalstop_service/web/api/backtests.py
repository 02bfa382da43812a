"""Routes of backtests: a policy replayed on past runs."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query
from pydantic import Field

from evalstop_service.domain.fields import Body, Integral, Plain
from evalstop_service.domain.run_results import Call
from evalstop_service.domain.statuses import BacktestState, DecisionOutcome, RunOutcome
from evalstop_service.evaluation import backtests
from evalstop_service.projects import policies
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.store.backtests import Backtest
from evalstop_service.web.api.examples import POLICY_DOCUMENT
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.policies import PolicyDocument
from evalstop_service.web.api.run_views import make_cursor
from evalstop_service.web.api.schemas import Answer, Cursor, Page, Time
from evalstop_service.web.context import Ctx, Db, Now, Operate, Read

router = APIRouter(prefix="/policies/backtests", tags=["policies"], route_class=JsonRoute)


class BacktestIn(Body):
    """A policy, and how many of the newest ended runs to replay."""

    policy: Annotated[str, Field(max_length=100), Plain] | PolicyDocument = Field(
        description="NAME, NAME@VERSION, or a document that need not be stored", examples=["cautious", POLICY_DOCUMENT]
    )
    runs: Annotated[int, Field(ge=1, le=backtests.MOST_RUNS), Integral] = Field(
        backtests.MOST_RUNS, description="how many of the newest ended runs to replay"
    )


class BacktestRunOut(Answer):
    """The verdict of the policy on one run, with the recorded decision and outcome."""

    run_id: UUID = Field(description="the replayed run")
    run_name: str = Field(description="the run's name")
    status: str = Field(description="how the run ended")
    last_step: int | None = Field(description="the highest step with an observation; null: no observation")
    policy: str = Field(description="the policy of the run, as NAME@VERSION")
    decision_id: UUID | None = Field(description="the recorded decision; null: none")
    decided_step: int | None = Field(description="the step of the recorded decision")
    state: str | None = Field(description="the state of the recorded decision")
    run_outcome: RunOutcome | None = Field(description="whether its eval had turned by its end; null: not assessed")
    turn_step: int | None = Field(description="the step where its eval turned; null: it did not, or is unknown")
    verdict: Call = Field(description="the last verdict of the replayed policy")
    step: int | None = Field(description="the step where the policy would have stopped the run; null: never")
    reason: str = Field(description="the reason of that verdict")
    outcome: DecisionOutcome = Field(description="whether the policy would have been right")
    hours_after: float | None = Field(description="GPU-hours that the run spent after `step`; null: unknown")
    error: str | None = Field(description="why the run could not be replayed")


class BacktestSummaryOut(Answer):
    """The findings counted; see `evaluation.backtests.Summary`."""

    runs: int = Field(description="replayed so far")
    stops: int = Field(description="runs that the policy would have stopped")
    right: int = Field(description="those of these stops whose runs had turned")
    wrong: int = Field(description="those of these stops whose runs were healthy")
    unknown: int = Field(description="those of these stops whose outcome is unknown")
    missed: int = Field(description="runs that turned and that the policy would not have stopped")
    decided: int = Field(description="recorded stops")
    only_policy: int = Field(description="runs that only the policy would have stopped")
    only_recorded: int = Field(description="runs that have a recorded stop and that the policy would not have stopped")
    hours_after: float = Field(description="GPU-hours after the policy's right stops")
    hours_wrong: float = Field(description="GPU-hours after the policy's wrong stops")
    stops_without_gpus: int = Field(description="stops with unknown GPU-hours")
    failed: int = Field(description="runs that could not be replayed")


class BacktestOut(Answer):
    """A backtest and its progress; `summary` and `findings` are left out of lists."""

    id: UUID = Field(description="id of the backtest")
    state: BacktestState = Field(description="waiting, running, done or failed")
    document: dict[str, Any] = Field(
        description="the policy that is replayed, with every number written out", examples=[POLICY_DOCUMENT]
    )
    most_runs: int = Field(description="the requested number of runs")
    total: int = Field(description="number of runs to replay; 0 until it has started")
    done: int = Field(description="runs replayed so far")
    actor: str = Field(description="who requested it")
    created_at: Time = Field(description="when it was requested")
    ended_at: Time | None = Field(description="when its last run was replayed; null: not yet")
    summary: BacktestSummaryOut | None = Field(None, description="counts over all findings")
    findings: list[BacktestRunOut] | None = Field(None, description="those that differ from recorded decisions first")


@router.get("")
def list_backtests(
    caller: Read,
    database: Db,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=100, description="maximum number of items per page")] = 20,
) -> Page[BacktestOut]:
    """The project's backtests, newest first."""
    with database.reading() as tx:
        rows = backtest_rows.list_backtests(tx, caller.project_id, before=cursor, limit=limit)
    items = [BacktestOut.model_validate(vars(row) | {"findings": None}) for row in rows]
    return Page[BacktestOut](items=items, next_cursor=make_cursor(rows, limit))


@router.post("", status_code=202)
def create_backtest(body: BacktestIn, caller: Operate, context: Ctx, database: Db, now: Now) -> BacktestOut:
    """Start a backtest on the newest ended runs; a worker runs it in the background."""
    context.limits.spend_costly()
    if isinstance(body.policy, str):
        with database.reading() as tx:
            document = policies.find_referred_policy(tx, caller.project_id, body.policy).document
    else:
        document = body.policy.root
    backtest = backtests.request_backtest(database, caller.project_id, document, body.runs, caller.actor, now)
    return _view_backtest(backtest)


@router.get("/{backtest_id}")
def get_backtest(
    backtest_id: Annotated[UUID, Path(description="`id` of the backtest, as returned when it was created or listed")],
    caller: Read,
    database: Db,
) -> BacktestOut:
    """The progress and the findings so far."""
    with database.reading() as tx:
        backtest = backtest_rows.load_backtest(tx, caller.project_id, backtest_id)
    return _view_backtest(backtest)


def _view_backtest(backtest: Backtest) -> BacktestOut:
    details = {
        "summary": vars(backtests.summarize_findings(backtest.findings)),
        "findings": backtests.sort_findings(backtest.findings),
    }
    return BacktestOut.model_validate(vars(backtest) | details)
