"""Seals the secrets that have to be kept readable, so that a copy of the database alone tells none of them.

AES-256-GCM with the id of the endpoint as associated data: a sealed secret that is moved to another row opens no
more, which Fernet could not tell. What is kept is `sealed:1:<key>:<nonce and ciphertext in base64>`, where `<key>`
names the key by the start of its SHA-256. Secrets from before there was a key stand as they are, and are read so.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import secrets
from collections.abc import Sequence
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from evalstop_service.errors import ServiceError

log = logging.getLogger(__name__)

SETTING = "EVALSTOP_SECRET_KEYS"
MARK = "sealed:1:"
KEY_BYTES = 32

_NONCE_BYTES = 12
_MOST_REMEMBERED = 4096


class Unreadable(ServiceError):
    """A secret that no key at hand opens; what it would sign waits."""


class Vault:
    """Seals with the first key, opens with any; without a key it seals nothing, and opens what was never sealed."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_name(key): AESGCM(key) for key in keys}
        self._first = _name(keys[0]) if keys else None
        self._opened: dict[tuple[str, UUID], str] = {}  # a busy endpoint's is asked for again and again
        self._told: set[str] = set()

    @property
    def seals(self) -> bool:
        """Whether there is a key."""
        return self._first is not None

    def seal(self, secret: str, owner: UUID) -> str:
        """The secret of an endpoint as it is to be kept."""
        if self._first is None:
            return secret
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + self._keys[self._first].encrypt(nonce, secret.encode(), owner.bytes)
        return f"{MARK}{self._first}:{base64.b64encode(sealed).decode()}"

    def open(self, kept: str, owner: UUID) -> str:
        """The secret of an endpoint; raises Unreadable, and logs so once."""
        if not kept.startswith(MARK):
            return kept
        secret = self._opened.get((kept, owner))
        if secret is None:
            try:
                secret = self._unsealed(kept, owner)
            except Unreadable as error:
                if kept not in self._told:
                    self._told.add(kept)
                    log.error("%s", error)
                raise
            if len(self._opened) >= _MOST_REMEMBERED:
                self._opened.clear()
            self._opened[kept, owner] = secret
        return secret

    def _unsealed(self, kept: str, owner: UUID) -> str:
        name, _, text = kept.removeprefix(MARK).partition(":")
        key = self._keys.get(name)
        if key is None:
            raise Unreadable(
                f"a secret of endpoint {owner} is sealed with key {name}, which is not among {SETTING}; "
                "what it would sign waits for that key"
            )
        try:
            sealed = base64.b64decode(text, validate=True)
            return key.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], owner.bytes).decode()
        except (InvalidTag, binascii.Error, ValueError):
            raise Unreadable(
                f"a secret of endpoint {owner} was changed since it was sealed, or belongs to another endpoint; "
                "give the endpoint a new one"
            ) from None


def parse(text: str | None) -> list[bytes]:
    """The keys that the setting names, separated by commas. ValueError: one of them is none."""
    keys = []
    for number, part in enumerate((part.strip() for part in (text or "").split(",")), 1):
        if not part:
            continue
        try:
            key = base64.b64decode(part.replace("-", "+").replace("_", "/"), validate=True)
        except binascii.Error:
            key = b""
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"key {number} is not {KEY_BYTES} bytes in base64; `openssl rand -base64 {KEY_BYTES}` makes one"
            )
        keys.append(key)
    return keys


def _name(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:8]
