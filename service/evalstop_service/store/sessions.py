"""Sessions of those who signed in by somebody else's word. Only the hash of a session's token is kept."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import sessions

PREFIX = "ess_"


@dataclass(frozen=True)
class Session:
    """Who signed in, by whose word, and what that lets them be where: names of projects to roles, `*` for all."""

    issuer: str
    subject: str
    name: str
    grants: dict[str, str]
    created_at: datetime
    expires_at: datetime


def create_session(tx: Transaction, session: Session) -> str:
    """Begin a session, and give its token; those that have expired are forgotten."""
    tx.execute(sessions.delete().where(sessions.c.expires_at <= session.created_at))
    token = PREFIX + secrets.token_urlsafe(32)
    tx.execute(sessions.insert().values(hash=_hash(token), **vars(session)))
    return token


def find_session(tx: Transaction, token: str, now: datetime) -> Session | None:
    """The session of this token, unless it has ended or expired."""
    query = sa.select(*_COLUMNS).where(sessions.c.hash == _hash(token), sessions.c.expires_at > now)
    row = tx.execute(query).one_or_none()
    return Session(*row) if row else None


def delete_session(tx: Transaction, token: str) -> None:
    """End a session for good."""
    tx.execute(sessions.delete().where(sessions.c.hash == _hash(token)))


_COLUMNS = [column for column in sessions.c if column.name != "hash"]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()  # of 256 random bits: there is nothing to guess
