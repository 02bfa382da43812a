"""Routes of backtests: a policy replayed on past runs."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query
from pydantic import Field

from evalstop_service.domain.fields import Body, Integral, Plain
from evalstop_service.domain.run import Call
from evalstop_service.evaluation import backtests
from evalstop_service.evaluation.backtests import Summary
from evalstop_service.projects import policies
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.store.backtests import Backtest, BacktestFinding
from evalstop_service.web.api.examples import POLICY_DOCUMENT
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.policies import PolicyDocument
from evalstop_service.web.api.run_views import make_cursor
from evalstop_service.web.api.schemas import Answer, Cursor, Page, answers
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


@answers(BacktestFinding)
class BacktestRunOut(Answer):
    """The verdict of the policy on one run, with the recorded decision and outcome."""

    status: str = Field(description="how the run ended")
    state: str | None = Field(description="the state of the recorded decision")
    verdict: Call = Field(description="the last verdict of the replayed policy")


@answers(Summary)
class BacktestSummaryOut(Answer):
    """The findings counted; see `evaluation.backtests.Summary`."""


@answers(Backtest)
class BacktestOut(Answer):
    """A backtest and its progress; `summary` and `findings` are left out of lists."""

    document: dict[str, Any] = Field(
        description="the policy that is replayed, with every number written out", examples=[POLICY_DOCUMENT]
    )
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
