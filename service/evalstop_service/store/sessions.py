"""Sessions of users signed in to the dashboard. Only the hash of a session's token is stored."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.security.scopes import EVERY
from evalstop_service.store.database import Transaction, read_columns
from evalstop_service.store.ids import new_id
from evalstop_service.store.keys import COLUMNS as KEY_COLUMNS
from evalstop_service.store.keys import Key, is_in_use
from evalstop_service.store.projects import Project
from evalstop_service.store.tables import keys, projects, sessions

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


class SignIn(NamedTuple):
    """A session; if it was started with a key, the key while it is valid, and the project of that key."""

    session: Session
    key: Key | None
    project: Project | None


def find_sign_in(tx: Transaction, token: str, now: datetime) -> SignIn | None:
    """The sign-in with this token, unless its session has ended or expired."""
    row = tx.execute(_FIND_SIGN_IN, {"of_hash": _hash_token(token), "now": now}).mappings().one_or_none()
    if row is None:
        return None
    key, project = read_columns(row, KEY_COLUMNS), read_columns(row, projects.c)
    return SignIn(
        Session(**read_columns(row, _COLUMNS)),
        Key(**key) if key["id"] else None,
        Project(**project) if project["id"] else None,
    )


def list_sessions(tx: Transaction, project_id: UUID, project_name: str, now: datetime) -> list[Session]:
    """The sessions with access to a project, oldest first."""
    of_project = sa.select(keys.c.id).where(keys.c.project_id == project_id, keys.c.revoked_at.is_(None))
    is_of_project = sessions.c.key_id.in_(of_project) | sessions.c.key_id.is_(None)
    query = sa.select(*_COLUMNS).where(sessions.c.expires_at > now, is_of_project).order_by(sessions.c.id)
    found = [Session(**row._mapping) for row in tx.execute(query)]
    return [session for session in found if session.key_id is not None or {project_name, EVERY} & session.grants.keys()]


def delete_session(tx: Transaction, session_id: UUID) -> None:
    """Delete a session."""
    tx.execute(sessions.delete().where(sessions.c.id == session_id))


_COLUMNS = [column for column in sessions.c if column.name != "hash"]

# Every page executes it; building it each time would take longer than that.
_FIND_SIGN_IN = (
    sa.select(*_COLUMNS, *KEY_COLUMNS, *projects.c)
    .outerjoin_from(sessions, keys, (keys.c.id == sessions.c.key_id) & is_in_use(sa.bindparam("now")))
    .outerjoin(projects, projects.c.id == keys.c.project_id)
    .where(sessions.c.hash == sa.bindparam("of_hash"), sessions.c.expires_at > sa.bindparam("now"))
)


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()  # of 256 random bits, which cannot be guessed
