"""Routes of the audit log: list it in pages, or export it in the order of its hash chain."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response
from pydantic import Field

from evalstop_service.domain.fields import Name
from evalstop_service.store import audit
from evalstop_service.store.audit import AuditEntry
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.list_filters import ListQuery
from evalstop_service.web.api.schemas import Answer, Page, Time, answers
from evalstop_service.web.context import Admin, Db

router = create_router("audit", prefix=f"{API}/audit")

JSON_LINES = "application/x-ndjson"


@answers(AuditEntry)
class AuditEntryOut(Answer):
    """One change and its author."""

    action: str = Field(
        description="resource and action, separated by a dot", examples=["decision.vetoed", "key.created"]
    )
    subject: str = Field(description="the kind and name of what was changed", examples=["key trainers"])


class AuditQuery(ListQuery):
    """Which entries to list, and which page."""

    actor: Name | None = Field(None, description="part of the actor's name")
    action: Name | None = Field(None, description="the action, or the part before its dot, such as key")


@router.get("")
def list_audit_entries(caller: Admin, database: Db, query: Annotated[AuditQuery, Query()]) -> Page[AuditEntryOut]:
    """The audit log, newest first; filter by `actor` (part of the name) or by `action` (such as `key`)."""
    with database.reading() as tx:
        entries = audit.list_entries(tx, caller.project_id, **query.to_arguments())
    return Page[AuditEntryOut].of(entries, query.limit)


@router.get(
    "/export",
    response_class=Response,
    responses={200: {"content": {JSON_LINES: {"schema": {"type": "string"}}}, "description": "One entry per line."}},
)
def export_changes(
    caller: Admin,
    database: Db,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="the last position that you have")] = 0,
    since: Annotated[Time | None, Query(description="no earlier entries")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="the most entries")] = 1000,
) -> Response:
    """The audit log as lines of JSON, oldest first, for your own archive; fewer than `limit` lines mean that it is
    complete.

    The `hash` of a line is the SHA-256 of the line without it, and `previous_hash` that of the line before.
    """
    with database.reading() as tx:
        changes = audit.list_chained(tx, caller.project_id, after=after, since=since, limit=limit)
    lines = (audit.canonical_json(caller.project_id, entry) + "\n" for entry in changes)
    return Response("".join(lines), media_type=JSON_LINES)
