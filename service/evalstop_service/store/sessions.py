"""Sessions of users signed in to the dashboard. Only the hash of a session's token is stored."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.security.scopes import EVERY
from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import keys, sessions

PREFIX = "ess_"


@dataclass(frozen=True)
class Session:
    """A signed-in user, identified by the key `key_id` or by an OpenID issuer.

    `grants`: the roles that the issuer's claims give, by project name, `*` for all projects.
    """

    issuer: str
    subject: str
    name: str
    grants: dict[str, str]
    created_at: datetime
    expires_at: datetime
    key_id: UUID | None = None
    id: UUID = field(default_factory=new_id)


def create_session(tx: Transaction, session: Session) -> str:
    """Create a session and return its token; expired sessions are deleted."""
    tx.execute(sessions.delete().where(sessions.c.expires_at <= session.created_at))
    token = PREFIX + secrets.token_urlsafe(32)
    tx.execute(sessions.insert().values(hash=_hash_token(token), **vars(session)))
    return token


def find_session(tx: Transaction, token: str, now: datetime) -> Session | None:
    """The session with this token, unless it has ended or expired."""
    query = sa.select(*_COLUMNS).where(sessions.c.hash == _hash_token(token), sessions.c.expires_at > now)
    row = tx.execute(query).one_or_none()
    return Session(**row._mapping) if row else None


def list_sessions(tx: Transaction, project_id: UUID, project_name: str, now: datetime) -> list[Session]:
    """The sessions with access to a project, oldest first."""
    of_project = sa.select(keys.c.id).where(keys.c.project_id == project_id, keys.c.revoked_at.is_(None))
    is_of_project = sessions.c.key_id.in_(of_project) | sessions.c.key_id.is_(None)
    query = sa.select(*_COLUMNS).where(sessions.c.expires_at > now, is_of_project).order_by(sessions.c.id)
    sessions_found = [Session(**row._mapping) for row in tx.execute(query)]
    return [
        session
        for session in sessions_found
        if session.key_id is not None or {project_name, EVERY} & session.grants.keys()
    ]


def delete_session(tx: Transaction, session_id: UUID) -> None:
    """Delete a session."""
    tx.execute(sessions.delete().where(sessions.c.id == session_id))


_COLUMNS = [column for column in sessions.c if column.name != "hash"]


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()  # of 256 random bits, which cannot be guessed
