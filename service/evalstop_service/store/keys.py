"""Bearer keys: made here, shown once, kept as hashes."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import keys

SCOPES = ("ingest", "read", "operate", "admin")

PREFIX = "esk_"


@dataclass(frozen=True)
class Key:
    """What a key may do. `project_id` is None for a key to the whole installation."""

    id: UUID
    project_id: UUID | None
    name: str
    scopes: tuple[str, ...]
    created_at: datetime
    revoked_at: datetime | None


def create_key(
    tx: Transaction, *, project_id: UUID | None, name: str, scopes: tuple[str, ...], now: datetime
) -> tuple[Key, str]:
    """Make a key; gives its row and the secret itself, which is stored nowhere."""
    secret = PREFIX + secrets.token_urlsafe(32)
    key = Key(new_id(), project_id, name, scopes, now, None)
    tx.execute(keys.insert().values(**(vars(key) | {"scopes": list(scopes)}), hash=_hash(secret)))
    return key, secret


def authenticate_key(tx: Transaction, secret: str) -> Key | None:
    """The unrevoked key with this secret."""
    return _one(tx, (keys.c.hash == _hash(secret)) & keys.c.revoked_at.is_(None))


def find_key(tx: Transaction, key_id: UUID) -> Key | None:
    """The unrevoked key with this id."""
    return _one(tx, (keys.c.id == key_id) & keys.c.revoked_at.is_(None))


def list_keys(tx: Transaction, project_id: UUID) -> list[Key]:
    """All keys of a project, the revoked ones too, oldest first."""
    query = sa.select(*_COLUMNS).where(keys.c.project_id == project_id).order_by(keys.c.id)
    return [_key(row) for row in tx.execute(query).mappings()]


def has_any_key(tx: Transaction) -> bool:
    """Whether any key was ever made."""
    return tx.execute(sa.select(sa.exists().select_from(keys))).scalar_one()


def revoke_key(tx: Transaction, project_id: UUID, key_id: UUID, now: datetime) -> Key | None:
    """Take a key out of use for good; None if the project has no such key in use."""
    condition = (keys.c.id == key_id) & (keys.c.project_id == project_id) & keys.c.revoked_at.is_(None)
    change = keys.update().where(condition).values(revoked_at=now).returning(*_COLUMNS)
    row = tx.execute(change).mappings().one_or_none()
    return _key(row) if row else None


_COLUMNS = [column for column in keys.c if column.name != "hash"]


def _one(tx: Transaction, condition: sa.ColumnElement[bool]) -> Key | None:
    row = tx.execute(sa.select(*_COLUMNS).where(condition)).mappings().one_or_none()
    return _key(row) if row else None


def _key(row: sa.RowMapping) -> Key:
    return Key(**(dict(row) | {"scopes": tuple(row["scopes"])}))


def _hash(secret: str) -> str:
    # A secret of 256 random bits needs no slow hash: there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()
