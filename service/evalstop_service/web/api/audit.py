"""Route of the audit log."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field

from evalstop_service.store import audit
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import make_cursor
from evalstop_service.web.api.schemas import Answer, Name, Page, Time
from evalstop_service.web.context import Admin, Db

router = APIRouter(prefix="/audit", tags=["audit"], route_class=JsonRoute)

Wanted = Name | None


class AuditEntryOut(Answer):
    """One change, and who made it."""

    id: UUID
    at: Time
    actor: str = Field(description="the authenticated actor: `key NAME`, or `user NAME` who signed in")
    action: str = Field(examples=["decision.vetoed", "key.made"])
    subject: str = Field(examples=["key trainers"])
    details: dict[str, Any]


class AuditPage(Page):
    """Changes, newest first."""

    items: list[AuditEntryOut]


@router.get("")
def list_changes(
    caller: Admin,
    database: Db,
    actor: Wanted = None,
    action: Wanted = None,
    cursor: UUID | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> AuditPage:
    """The audit log, newest first; filter by `actor` (part of the name) or by `action` (such as `key`)."""
    with database.reading() as tx:
        found = audit.list_entries(tx, caller.project_id, actor=actor, action=action, before=cursor, limit=limit)
    items = [AuditEntryOut.model_validate(entry) for entry in found]
    return AuditPage(items=items, next_cursor=make_cursor(found, limit))
