"""Routes of policies. A stored version never changes."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from evalstop_detectors import policy_from_document
from fastapi import APIRouter, Path, Query, Response
from pydantic import Field, RootModel

from evalstop_service.decisions import second_person
from evalstop_service.errors import NotFound
from evalstop_service.projects import policies
from evalstop_service.store.proposals import Proposal
from evalstop_service.web.api.examples import POLICY_DOCUMENT
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.proposals import WAITS, answer_proposal
from evalstop_service.web.api.schemas import Answer, Items, Limit, Page, Time
from evalstop_service.web.context import Admin, Ctx, Db, Now, Read

router = APIRouter(prefix="/policies", tags=["policies"], route_class=JsonRoute)


_REFERENCE = r"^[^@]{1,64}@[0-9]{1,9}$"


class PolicyDocument(RootModel[dict[str, Any]]):
    """A policy document; the detectors' `describe_document` defines its fields."""


class PolicyOut(Answer):
    """One version of a policy. A shipped policy has no id until a run uses it."""

    id: UUID | None = Field(description="null: shipped with EvalStop, and not used by a run yet")
    name: str = Field(description="shared by all its versions")
    version: int = Field(description="counted from 1")
    document: dict[str, Any] = Field(description="the policy with all defaults filled in", examples=[POLICY_DOCUMENT])
    created_at: Time | None = Field(description="when it was stored; null: shipped with EvalStop")


@router.get("")
def list_policies(
    caller: Read,
    database: Db,
    cursor: Annotated[str | None, Query(pattern=_REFERENCE, description="`next_cursor` of the previous page")] = None,
    limit: Limit = 50,
) -> Page[PolicyOut]:
    """The project's policies and the shipped ones in all versions, by name, the newest version first."""
    with database.reading() as tx:
        versions = policies.list_versions(tx, caller.project_id)
    if cursor is not None:
        name, _, version = cursor.partition("@")
        versions = [policy for policy in versions if (policy.name, -policy.version) > (name, -int(version))]
    listed = versions[:limit]
    next_cursor = listed[-1].reference if len(versions) > limit else None
    return Page[PolicyOut](items=[PolicyOut.model_validate(policy) for policy in listed], next_cursor=next_cursor)


@router.get("/{name}")
def get_policy(
    name: Annotated[str, Path(description="name of the policy")], caller: Read, database: Db
) -> Items[PolicyOut]:
    """All versions of one policy, the newest first."""
    with database.reading() as tx:
        versions = policies.list_versions(tx, caller.project_id)
    items = [PolicyOut.model_validate(policy) for policy in versions if policy.name == name]
    if not items:
        raise NotFound(f"there is no policy {name!r} in this project")
    return Items[PolicyOut](items=items)


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
