"""Bearer keys, and sessions of users signed in to the dashboard: shown once, stored as hashes."""

from __future__ import annotations

import hashlib
import secrets
import string
import zlib
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.security.scopes import EVERY
from evalstop_service.store.database import Transaction, find_all, find_one, find_page
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import keys, sessions
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.projects import Key as Key
from evalstop_service.store.tables.projects import Session as Session

SCOPES = ("ingest", "read", "report", "operate", "admin")

PREFIX = "esk_"
"""Identifies a key to secret scanners, together with its 43 random characters and 6 characters of checksum."""

_ALPHABET = string.digits + string.ascii_letters
_RANDOM_CHARACTERS, _CHECKSUM_CHARACTERS = 43, 6  # 256 bits, and 32

USE_SECONDS = 3600.0
"""The precision of `last_used_at`."""


@dataclass(frozen=True)
class KeyLimits:
    """What restricts a key beside its scopes.

    `expires_at`: None, never. `networks`: the addresses from which it is accepted, none for all. `endpoint_ids`: the
    endpoints whose stops it may report on and fetch, none for all of the project.
    """

    expires_at: datetime | None = None
    networks: tuple[str, ...] = ()
    endpoint_ids: tuple[UUID, ...] = ()


UNLIMITED = KeyLimits()


def create_key(
    tx: Transaction,
    *,
    project_id: UUID | None,
    name: str,
    scopes: tuple[str, ...],
    now: datetime,
    limits: KeyLimits = UNLIMITED,
) -> tuple[Key, str]:
    """Create a key; returns its row and the secret itself, which is not stored."""
    secret = generate_secret()
    key = Key(new_id(), project_id, name, scopes, now, None, **asdict(limits))
    tx.execute(keys.insert().values(**vars(key), hash=_hash_secret(secret)))
    return key, secret


def generate_secret() -> str:
    """A new secret: the prefix, 256 random bits, and a checksum, which tells malformed keys."""
    random = "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARACTERS))
    return PREFIX + random + _compute_checksum(random)


def is_well_formed(secret: str) -> bool:
    """Whether a text has the prefix and checksum of a key."""
    random, checksum = secret[len(PREFIX) : -_CHECKSUM_CHARACTERS], secret[-_CHECKSUM_CHARACTERS:]
    return (
        secret.startswith(PREFIX)
        and len(random) == _RANDOM_CHARACTERS
        and secret.isascii()
        and checksum == _compute_checksum(random)
    )


def authenticate_key(tx: Transaction, secret: str, now: datetime) -> Key | None:
    """The valid key with this secret."""
    return find_one(tx, Key, sa.select(*COLUMNS).where(keys.c.hash == _hash_secret(secret), is_in_use(now)))


def find_key(tx: Transaction, key_id: UUID, now: datetime) -> Key | None:
    """The valid key with this id."""
    return find_one(tx, Key, sa.select(*COLUMNS).where(keys.c.id == key_id, is_in_use(now)))


def find_project_id(tx: Transaction, secret_hash: str) -> UUID | None:
    """The project of the key, valid or not, with this hash of its secret."""
    return tx.execute(sa.select(keys.c.project_id).where(keys.c.hash == secret_hash)).scalar()


def record_use(tx: Transaction, key_id: UUID, now: datetime) -> None:
    """Record that a key is used, at most once in `USE_SECONDS`."""
    long_ago = keys.c.last_used_at.is_(None) | (keys.c.last_used_at <= now - timedelta(seconds=USE_SECONDS))
    tx.execute(keys.update().where(keys.c.id == key_id, long_ago).values(last_used_at=now))


def list_keys(tx: Transaction, project_id: UUID, *, before: UUID | None = None, limit: int) -> list[Key]:
    """The keys of a project, revoked ones included, newest first, before the key `before`."""
    query = sa.select(*COLUMNS).where(keys.c.project_id == project_id)
    return find_page(tx, Key, query, keys.c.id, before, limit)


def list_keys_in_use(tx: Transaction, project_id: UUID, now: datetime) -> list[Key]:
    """The valid keys of a project, whose number a quota limits, oldest first."""
    query = sa.select(*COLUMNS).where(keys.c.project_id == project_id, is_in_use(now)).order_by(keys.c.id)
    return find_all(tx, Key, query)


def lock_keys(tx: Transaction) -> None:
    """Keep other transactions from changing keys until this one ends; on the embedded database it is alone anyway."""
    if tx.dialect.name == "postgresql":
        tx.exec_driver_sql("LOCK TABLE keys IN SHARE ROW EXCLUSIVE MODE")


def has_any_key(tx: Transaction) -> bool:
    """Whether any key was ever created."""
    return tx.execute(sa.select(sa.exists().select_from(keys))).scalar_one()


def revoke_key(tx: Transaction, project_id: UUID, key_id: UUID, now: datetime) -> Key | None:
    """Revoke a key; None if the project has no such valid key."""
    condition = (keys.c.id == key_id) & (keys.c.project_id == project_id) & keys.c.revoked_at.is_(None)
    return find_one(tx, Key, keys.update().where(condition).values(revoked_at=now).returning(*COLUMNS))


COLUMNS = columns_of(keys, Key)


def is_in_use(now: datetime | sa.BindParameter[Any]) -> sa.ColumnElement[bool]:
    """The condition that a key is valid."""
    return keys.c.revoked_at.is_(None) & (keys.c.expires_at.is_(None) | (keys.c.expires_at > now))


def _compute_checksum(random: str) -> str:
    number, digits = zlib.crc32(random.encode()), ""
    for _ in range(_CHECKSUM_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits


def _hash_secret(secret: str) -> str:
    # A secret of 256 random bits needs no slow hash: it cannot be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()


SESSION_PREFIX = "ess_"


def create_session(tx: Transaction, session: Session) -> str:
    """Create a session and return its token; expired sessions are deleted."""
    tx.execute(sessions.delete().where(sessions.c.expires_at <= session.created_at))
    token = SESSION_PREFIX + secrets.token_urlsafe(32)
    tx.execute(sessions.insert().values(hash=_hash_secret(token), **vars(session)))
    return token


def find_session(tx: Transaction, token: str, now: datetime) -> Session | None:
    """The session with this token, unless it has ended or expired."""
    return find_one(tx, Session, _FIND_SESSION, {"of_hash": _hash_secret(token), "now": now})


def list_sessions(tx: Transaction, project_id: UUID, project_name: str, now: datetime) -> list[Session]:
    """The sessions with access to a project, oldest first."""
    of_project = sa.select(keys.c.id).where(keys.c.project_id == project_id, keys.c.revoked_at.is_(None))
    is_of_project = sessions.c.key_id.in_(of_project) | sessions.c.key_id.is_(None)
    query = sa.select(*_SESSION_COLUMNS).where(sessions.c.expires_at > now, is_of_project).order_by(sessions.c.id)
    found = find_all(tx, Session, query)
    return [session for session in found if session.key_id is not None or {project_name, EVERY} & session.grants.keys()]


def delete_session(tx: Transaction, session_id: UUID) -> None:
    """Delete a session."""
    tx.execute(sessions.delete().where(sessions.c.id == session_id))


_SESSION_COLUMNS = columns_of(sessions, Session)

# Every page executes it; building it each time would take longer than that.
_FIND_SESSION = sa.select(*_SESSION_COLUMNS).where(
    sessions.c.hash == sa.bindparam("of_hash"), sessions.c.expires_at > sa.bindparam("now")
)
