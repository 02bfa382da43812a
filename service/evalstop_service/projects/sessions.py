"""The people who are signed in to a project: listed, and signed out by an admin, in the audit log."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from evalstop_service.errors import NotFound
from evalstop_service.store import projects, sessions
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.sessions import Session


def list_sessions(tx: Transaction, project_id: UUID, now: datetime) -> list[Session]:
    """The sessions in which the project is open to somebody, oldest first."""
    return sessions.list_sessions(tx, project_id, projects.get_project(tx, project_id).name, now)


def end_session(database: Database, author: Author, session_id: UUID) -> None:
    """End a session, in all projects that it opens; raises NotFound when it does not open this one."""
    with database.transaction() as tx:
        found = [one for one in list_sessions(tx, author.project_id, author.at) if one.id == session_id]
        if not found:
            raise NotFound(f"there is no session {session_id} in this project")
        sessions.delete_session(tx, session_id)
        author.record(tx, "session.ended", f"session of {found[0].name}", {"id": str(session_id)})
