"""The people signed in to a project: listed, and signed out by an admin, with an audit entry."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from evalstop_service.errors import NotFound
from evalstop_service.store import keys, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.keys import Session


def list_sessions(tx: Transaction, project_id: UUID, now: datetime) -> list[Session]:
    """The sessions with access to the project, oldest first."""
    return keys.list_sessions(tx, project_id, projects.get_project(tx, project_id).name, now)


def end_session(database: Database, author: Author, session_id: UUID) -> None:
    """End a session, for all its projects; raises NotFound when it has no access to this one."""
    with database.transaction() as tx:
        matching = [session for session in list_sessions(tx, author.project_id, author.at) if session.id == session_id]
        if not matching:
            raise NotFound(f"there is no session {session_id} in this project")
        keys.delete_session(tx, session_id)
        author.record(tx, "session.ended", f"session of {matching[0].name}", {"id": str(session_id)})
