"""Routes of rollout stages, which a policy earns by its measured precision."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import Field

from evalstop_service.decisions import second_person
from evalstop_service.domain.confidence_sequences import StageNumbers
from evalstop_service.domain.fields import Body, Line
from evalstop_service.errors import NotFound
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageTerms
from evalstop_service.projects import policies
from evalstop_service.store import rollout_stages
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.proposals import WAITS, answer_proposal
from evalstop_service.web.api.schemas import Answer, answers
from evalstop_service.web.context import Admin, Caller, Db, Now, Read

router = APIRouter(prefix="/policies/{name}/rollout-stage", tags=["policies"], route_class=JsonRoute)


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


@answers(StageNumbers)
class StageNumbersOut(Answer):
    """The precision at the last change of stage; null at the start."""


class NotCountedOut(Answer):
    """Observed stops of this version that do not count, by the first requirement that they miss."""

    duration: int = Field(description="lasted less than the project's case_seconds")
    evals: int = Field(description="fewer finite evals than case_evals")
    gpu_hours: int = Field(description="fewer GPU-hours than case_gpu_hours")
    key_and_day: int = Field(description="beyond the cases_per_key_and_day of their key and day")


class StageCasesOut(Answer):
    """The observed stops of this version."""

    counted: int = Field(description="those that its precision is estimated from")
    not_counted: NotCountedOut = Field(description="the others, by the requirement that they miss")


@answers(RolloutStage)
class RolloutStageOut(Answer):
    """The rollout stage of a policy, since when, and the numbers behind it."""

    cases: StageCasesOut = Field(description="the cases so far")


PolicyName = Annotated[str, Path(max_length=256, description="name of the policy")]


@router.get("")
def get_rollout_stage(name: PolicyName, caller: Read, database: Db) -> RolloutStageOut:
    """The rollout stage of the policy; 404 if it has none."""
    return _load_stage(database, caller, name)


@router.put("", response_model=RolloutStageOut, responses=WAITS)
def set_rollout_stage(
    name: PolicyName, body: RolloutStageIn, caller: Admin, database: Db, now: Now
) -> RolloutStageOut | Response:
    """Start a policy's rollout in shadow, or change its terms. In a project with `second_person`, a lower
    `required_precision` or a higher `canary_share` waits for another admin: 202."""
    terms = StageTerms(body.required_precision, body.canary_share)
    waiting = second_person.set_stage(database, caller.author(now), name, terms)
    return _load_stage(database, caller, name) if waiting is None else answer_proposal(waiting, now)


@router.post("/demote")
def demote_policy(name: PolicyName, body: DemotionIn, caller: Admin, database: Db, now: Now) -> RolloutStageOut:
    """Move a policy back to shadow, whatever its cases show: its stops are only recorded until new cases earn the next
    stage. 409 if it is in shadow, or has no rollout stage. A higher stage is confirmed as a proposal."""
    with database.transaction() as tx:
        policies.load_version(tx, caller.project_id, name)
        return _view_stage(tx, rollout_stage.lower_stage(tx, caller.author(now), name, body.reason))


@router.delete("", status_code=204, responses=WAITS)
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
