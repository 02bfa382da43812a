"""Route of the audit log."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field

from evalstop_service.store import audit
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import make_cursor
from evalstop_service.web.api.schemas import Answer, Cursor, Limit, Name, Page, Time
from evalstop_service.web.context import Admin, Db

router = APIRouter(prefix="/audit", tags=["audit"], route_class=JsonRoute)

Wanted = Name | None


class AuditEntryOut(Answer):
    """One change, and who made it."""

    id: UUID = Field(description="of the entry; ids ascend with time")
    at: Time = Field(description="when it was changed")
    actor: str = Field(description="the authenticated actor: `key NAME`, or `user NAME` who signed in")
    action: str = Field(
        description="the kind of thing, a dot, and what was done to it", examples=["decision.vetoed", "key.made"]
    )
    subject: str = Field(description="the kind and name of what was changed", examples=["key trainers"])
    details: dict[str, Any] = Field(description="what was said with it: a reason, or the values before and after")


class AuditPage(Page):
    """Changes, newest first."""

    items: list[AuditEntryOut] = Field(description="newest first")


@router.get("")
def list_audit_entries(
    caller: Admin,
    database: Db,
    actor: Annotated[Wanted, Query(description="part of the name of who did it")] = None,
    action: Annotated[Wanted, Query(description="the action, or the part before its dot, such as key")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> AuditPage:
    """The audit log, newest first; filter by `actor` (part of the name) or by `action` (such as `key`)."""
    with database.reading() as tx:
        found = audit.list_entries(tx, caller.project_id, actor=actor, action=action, before=cursor, limit=limit)
    items = [AuditEntryOut.model_validate(entry) for entry in found]
    return AuditPage(items=items, next_cursor=make_cursor(found, limit))
