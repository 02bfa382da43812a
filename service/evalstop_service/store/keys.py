"""Bearer keys: made here, shown once, kept as hashes."""

from __future__ import annotations

import hashlib
import secrets
import string
import zlib
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import keys

SCOPES = ("ingest", "read", "report", "operate", "admin")

PREFIX = "esk_"
"""By this, the 43 characters after it and the 6 of their checksum a scanner for leaked secrets knows a key."""

_ALPHABET = string.digits + string.ascii_letters
_RANDOM_CHARACTERS, _CHECKSUM_CHARACTERS = 43, 6  # 256 bits, and 32

USE_SECONDS = 3600.0
"""How exactly it is known when a key was used last."""


@dataclass(frozen=True)
class KeyLimits:
    """What narrows a key beside its scopes.

    `expires_at`: None, never. `networks`: the addresses from which it is taken, none for all. `endpoint_ids`: the
    endpoints whose stops it may report on and fetch, none for all of the project.
    """

    expires_at: datetime | None = None
    networks: tuple[str, ...] = ()
    endpoint_ids: tuple[UUID, ...] = ()


UNLIMITED = KeyLimits()


@dataclass(frozen=True)
class Key:
    """What a key may do. `project_id` is None for a key to the whole installation."""

    id: UUID
    project_id: UUID | None
    name: str
    scopes: tuple[str, ...]
    created_at: datetime
    revoked_at: datetime | None
    expires_at: datetime | None = None
    networks: tuple[str, ...] = ()
    endpoint_ids: tuple[UUID, ...] = ()
    last_used_at: datetime | None = None
    previous_until: datetime | None = None


def create_key(
    tx: Transaction,
    *,
    project_id: UUID | None,
    name: str,
    scopes: tuple[str, ...],
    now: datetime,
    limits: KeyLimits = UNLIMITED,
) -> tuple[Key, str]:
    """Make a key; gives its row and the secret itself, which is stored nowhere."""
    secret = generate_secret()
    key = Key(new_id(), project_id, name, scopes, now, None, **asdict(limits))
    lists = {"scopes": scopes, "networks": limits.networks, "endpoint_ids": [str(one) for one in key.endpoint_ids]}
    tx.execute(keys.insert().values(**(vars(key) | lists), hash=_hash(secret)))
    return key, secret


def generate_secret() -> str:
    """A fresh secret: a prefix, 256 random bits, and a checksum by which what is no key is known as such."""
    random = "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARACTERS))
    return PREFIX + random + _checksum(random)


def is_well_formed(secret: str) -> bool:
    """Whether a text may be a key at all, by its prefix and checksum."""
    random, checksum = secret[len(PREFIX) : -_CHECKSUM_CHARACTERS], secret[-_CHECKSUM_CHARACTERS:]
    return (
        secret.startswith(PREFIX)
        and len(random) == _RANDOM_CHARACTERS
        and secret.isascii()
        and checksum == _checksum(random)
    )


def authenticate_key(tx: Transaction, secret: str, now: datetime) -> Key | None:
    """The key in use with this secret, or with this one before it was rotated, while that is still taken."""
    given = _hash(secret)
    present = (keys.c.hash == given) | ((keys.c.previous_hash == given) & (keys.c.previous_until > now))
    return _one(tx, present & _in_use(now))


def find_key(tx: Transaction, key_id: UUID, now: datetime) -> Key | None:
    """The key in use with this id."""
    return _one(tx, (keys.c.id == key_id) & _in_use(now))


def record_use(tx: Transaction, key_id: UUID, now: datetime) -> None:
    """Record that a key is used, once within `USE_SECONDS`."""
    long_ago = keys.c.last_used_at.is_(None) | (keys.c.last_used_at <= now - timedelta(seconds=USE_SECONDS))
    tx.execute(keys.update().where(keys.c.id == key_id, long_ago).values(last_used_at=now))


def rotate_key(
    tx: Transaction, project_id: UUID, key_id: UUID, now: datetime, previous_until: datetime
) -> tuple[Key, str] | None:
    """Give a key a new secret; the present one is taken until `previous_until`. None if there is no such key in use."""
    secret = generate_secret()
    condition = (keys.c.id == key_id) & (keys.c.project_id == project_id) & _in_use(now)
    values = {"hash": _hash(secret), "previous_hash": keys.c.hash, "previous_until": previous_until}
    row = tx.execute(keys.update().where(condition).values(values).returning(*_COLUMNS)).mappings().one_or_none()
    return (_key(row), secret) if row else None


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


_COLUMNS = [column for column in keys.c if column.name not in ("hash", "previous_hash")]


def _in_use(now: datetime) -> sa.ColumnElement[bool]:
    return keys.c.revoked_at.is_(None) & (keys.c.expires_at.is_(None) | (keys.c.expires_at > now))


def _one(tx: Transaction, condition: sa.ColumnElement[bool]) -> Key | None:
    row = tx.execute(sa.select(*_COLUMNS).where(condition)).mappings().one_or_none()
    return _key(row) if row else None


def _key(row: sa.RowMapping) -> Key:
    lists = {name: tuple(row[name]) for name in ("scopes", "networks")}
    return Key(**(dict(row) | lists | {"endpoint_ids": tuple(map(UUID, row["endpoint_ids"]))}))


def _checksum(random: str) -> str:
    number, digits = zlib.crc32(random.encode()), ""
    for _ in range(_CHECKSUM_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits


def _hash(secret: str) -> str:
    # A secret of 256 random bits needs no slow hash: there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()
