"""Routes of policies: their versions, which never change, backtests on past runs, and the rollout stages that they earn
by their measured precision.
"""

from __future__ import annotations

from typing import Annotated, Any

from evalstop_detectors import policy_from_document
from fastapi import Path, Query, Response
from pydantic import Field, RootModel

from evalstop_service.decisions import second_person
from evalstop_service.domain.fields import Body, Integral, Line, Plain
from evalstop_service.domain.run import Call
from evalstop_service.errors import NotFound
from evalstop_service.evaluation import backtests, rollout_stage
from evalstop_service.evaluation.backtests import Summary
from evalstop_service.evaluation.rollout_stage import StageTerms
from evalstop_service.projects import policies
from evalstop_service.store import policies as policy_rows
from evalstop_service.store import rollout_stages
from evalstop_service.store.backtests import Backtest, BacktestFinding
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.policies import StoredPolicy
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.proposals import WAITS, answer_proposal
from evalstop_service.web.api.schemas import Answer, Limit, Page, answers
from evalstop_service.web.context import Admin, Caller, Ctx, Db, Now, Operate, Read

router = create_router("policies", prefix=f"{API}/policies")

POLICY_DOCUMENT = {
    "name": "patient",
    "description": "Seven declines in a row, after ten evals.",
    "members": [{"detector": "k_decline", "params": {"k": 7}}],
    "min_evals": 10,
}


class PolicyDocument(RootModel[dict[str, Any]]):
    """A policy document; the detectors' `describe_document` defines its fields."""


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
    """A backtest."""

    document: dict[str, Any] = Field(
        description="the policy that is replayed, with every number written out", examples=[POLICY_DOCUMENT]
    )
    summary: BacktestSummaryOut = Field(description="counts over all findings")
    findings: list[BacktestRunOut] = Field(description="those that differ from recorded decisions first")


@router.post("/backtests", status_code=201)
def create_backtest(body: BacktestIn, caller: Operate, context: Ctx, database: Db, now: Now) -> BacktestOut:
    """Replay a policy on the newest ended runs, as many as eight seconds allow."""
    context.limits.spend_costly()
    if isinstance(body.policy, str):
        with database.reading() as tx:
            document = policies.find_referred_policy(tx, caller.project_id, body.policy).document
    else:
        document = body.policy.root
    backtest = backtests.run_backtest(database, caller.project_id, document, body.runs, caller.actor, now)
    details = {
        "summary": vars(backtests.summarize_findings(backtest.findings)),
        "findings": backtests.sort_findings(backtest.findings),
    }
    return BacktestOut.model_validate(vars(backtest) | details)


_REFERENCE = r"^[^@]{1,64}@[0-9]{1,9}$"


@answers(StoredPolicy)
class PolicyOut(Answer):
    """One version of a policy."""

    document: dict[str, Any] = Field(description="the policy with all defaults filled in", examples=[POLICY_DOCUMENT])


@router.get("")
def list_policies(
    caller: Read,
    database: Db,
    cursor: Annotated[str | None, Query(pattern=_REFERENCE, description="`next_cursor` of the previous page")] = None,
    limit: Limit = 50,
) -> Page[PolicyOut]:
    """The project's policies in all versions, by name, the newest version first."""
    with database.reading() as tx:
        versions = policy_rows.list_policies(tx, caller.project_id)
    if cursor is not None:
        name, _, version = cursor.partition("@")
        versions = [policy for policy in versions if (policy.name, -policy.version) > (name, -int(version))]
    listed = versions[:limit]
    next_cursor = listed[-1].reference if len(versions) > limit else None
    return Page[PolicyOut](items=[PolicyOut.model_validate(policy) for policy in listed], next_cursor=next_cursor)


@router.post("", status_code=201, response_model=PolicyOut, responses=WAITS)
def create_policy(
    document: PolicyDocument, caller: Admin, context: Ctx, database: Db, now: Now
) -> PolicyOut | Response:
    """Store a policy as the next version of its name. Runs keep their version.

    In a project with `second_person`, a version of a policy that trainers may rely on by its name waits for another
    admin: 202.
    """
    context.limits.spend_costly()
    policy = policy_from_document(document.root)
    stored = second_person.add_policy(database, caller.author(now), policy)
    return answer_proposal(stored, now) if isinstance(stored, Proposal) else PolicyOut.model_validate(stored)


class RolloutStageIn(Body):
    """The requirements for a higher rollout stage."""

    required_precision: float = Field(
        ge=0.5, lt=1, description="what the lower bound of its precision must reach", examples=[0.9]
    )
    canary_share: float = Field(0.2, gt=0, le=0.5, description="share of its stops that are carried out in canary")


class DemotionIn(Body):
    """Why a policy goes back to shadow."""

    reason: Line = Field(
        min_length=1,
        description="why; recorded in the audit log and in the event",
        examples=["the eval set was replaced"],
    )


class StageCasesOut(Answer):
    """The observed stops of this version."""

    counted: int = Field(description="those that its precision is estimated from")
    not_counted: int = Field(description="the others, of short runs or beyond the limit of their key and day")


@answers(RolloutStage)
class RolloutStageOut(Answer):
    """The rollout stage of a policy, since when, and the numbers behind it."""

    cases: StageCasesOut = Field(description="the cases so far")


PolicyName = Annotated[str, Path(max_length=256, description="name of the policy")]


@router.get("/{name}/rollout-stage")
def get_rollout_stage(name: PolicyName, caller: Read, database: Db) -> RolloutStageOut:
    """The rollout stage of the policy; 404 if it has none."""
    return _load_stage(database, caller, name)


@router.put("/{name}/rollout-stage", response_model=RolloutStageOut, responses=WAITS)
def set_rollout_stage(
    name: PolicyName, body: RolloutStageIn, caller: Admin, database: Db, now: Now
) -> RolloutStageOut | Response:
    """Start a policy's rollout in shadow, or change its terms. In a project with `second_person`, a lower
    `required_precision` or a higher `canary_share` waits for another admin: 202."""
    terms = StageTerms(body.required_precision, body.canary_share)
    waiting = second_person.set_stage(database, caller.author(now), name, terms)
    return _load_stage(database, caller, name) if waiting is None else answer_proposal(waiting, now)


@router.post("/{name}/rollout-stage/demote")
def demote_policy(name: PolicyName, body: DemotionIn, caller: Admin, database: Db, now: Now) -> RolloutStageOut:
    """Move a policy back to shadow, whatever its cases show: its stops are only recorded until new cases earn the next
    stage. 409 if it is in shadow, or has no rollout stage. A higher stage is confirmed as a proposal."""
    with database.transaction() as tx:
        policies.load_version(tx, caller.project_id, name)
        return _view_stage(tx, rollout_stage.lower_stage(tx, caller.author(now), name, body.reason))


@router.delete("/{name}/rollout-stage", status_code=204, responses=WAITS)
def remove_rollout_stage(name: PolicyName, caller: Admin, database: Db, now: Now) -> Response:
    """Remove the rollout stage; only the mode of its runs counts again. Removing it twice is harmless."""
    with database.reading() as tx:
        policies.load_version(tx, caller.project_id, name)
    waiting = second_person.remove_stage(database, caller.author(now), name)
    return Response(status_code=204) if waiting is None else answer_proposal(waiting, now)


def _load_stage(database: Database, caller: Caller, name: str) -> RolloutStageOut:
    with database.reading() as tx:
        stage = rollout_stages.find_stage(tx, caller.project_id, name)
        if stage is None:
            raise NotFound(f"policy {name!r} has no rollout stage; only the mode of its runs counts")
        return _view_stage(tx, stage)


def _view_stage(tx: Transaction, stage: RolloutStage) -> RolloutStageOut:
    return RolloutStageOut.model_validate(vars(stage) | {"cases": rollout_stage.load_stage_cases(tx, stage)})
