"""Routes of sessions: who is signed in to the project's dashboard."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path
from pydantic import Field

from evalstop_service.projects import api_keys
from evalstop_service.store.keys import Session
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.api.schemas import Answer, Items, answers
from evalstop_service.web.context import Admin, Db, Now

router = APIRouter(prefix="/sessions", tags=["keys"], route_class=JsonRoute)


@answers(Session)
class SessionOut(Answer):
    """A person, or key, that is signed in to the dashboard."""

    name: str = Field(description="name of the person or key", examples=["dana@example.com"])


@router.get("")
def list_sessions(caller: Admin, database: Db, now: Now) -> Items[SessionOut]:
    """All sessions with access to the project, oldest first."""
    with database.reading() as tx:
        return Items[SessionOut].model_validate({"items": api_keys.list_sessions(tx, caller.project_id, now)})


@router.delete("/{session_id}", status_code=204)
def end_session(
    session_id: Annotated[UUID, Path(description="`id` of the session, as listed")],
    caller: Admin,
    database: Db,
    now: Now,
) -> None:
    """End a session, in all projects that it can access."""
    api_keys.end_session(database, caller.author(now), session_id)
