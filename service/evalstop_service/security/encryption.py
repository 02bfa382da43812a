"""Encrypts the webhook secrets in the database, so that a copy of the database reveals none of them.

AES-256-GCM with the endpoint's id as associated data: an encrypted secret that was copied to another row cannot be
decrypted, which Fernet would not detect. The stored form is `encrypted:1:<key>:<nonce and ciphertext in base64>`, where
`<key>` is the first 8 hex digits of the key's SHA-256. A secret without that prefix is plain text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import secrets
from collections.abc import Sequence
from functools import lru_cache
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from evalstop_service.errors import ServiceError

log = logging.getLogger(__name__)

SETTING = "EVALSTOP_SECRET_KEYS"
PREFIX = "encrypted:1:"
KEY_BYTES = 32

_NONCE_BYTES = 12
_CACHED_SECRETS = 4096


class UnreadableSecret(ServiceError):
    """No configured key decrypts a webhook secret. Deliveries signed with it wait."""


class Encryption:
    """Encrypts with the first key and decrypts with any; without a key, secrets are stored as plain text."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_key_id(key): AESGCM(key) for key in keys}
        self._first = _key_id(keys[0]) if keys else None
        self._decrypt_cached = lru_cache(_CACHED_SECRETS)(self._decrypt)  # busy endpoints need theirs for each delivery
        self._logged: set[str] = set()

    @property
    def has_key(self) -> bool:
        """Whether secrets are encrypted."""
        return self._first is not None

    def encrypt(self, secret: str, endpoint_id: UUID) -> str:
        """The secret of an endpoint as the database stores it."""
        if self._first is None:
            return secret
        nonce = secrets.token_bytes(_NONCE_BYTES)
        ciphertext = nonce + self._keys[self._first].encrypt(nonce, secret.encode(), endpoint_id.bytes)
        return f"{PREFIX}{self._first}:{base64.b64encode(ciphertext).decode()}"

    def decrypt(self, stored: str, endpoint_id: UUID) -> str:
        """The secret of an endpoint; raises UnreadableSecret, logged once for each secret."""
        if not stored.startswith(PREFIX):
            return stored
        try:
            return self._decrypt_cached(stored, endpoint_id)
        except UnreadableSecret as error:
            if stored not in self._logged:
                self._logged.add(stored)
                log.error("%s", error)
            raise

    def _decrypt(self, stored: str, endpoint_id: UUID) -> str:
        key_id, _, text = stored.removeprefix(PREFIX).partition(":")
        key = self._keys.get(key_id)
        if key is None:
            raise UnreadableSecret(
                f"a secret of endpoint {endpoint_id} is encrypted with key {key_id}, which is not in {SETTING}; "
                "add that key to resume the deliveries signed with this secret"
            )
        try:
            ciphertext = base64.b64decode(text, validate=True)
            return key.decrypt(ciphertext[:_NONCE_BYTES], ciphertext[_NONCE_BYTES:], endpoint_id.bytes).decode()
        except (InvalidTag, binascii.Error, ValueError):
            raise UnreadableSecret(
                f"a secret of endpoint {endpoint_id} was changed in the database or copied from another endpoint; "
                "rotate the secret of this endpoint"
            ) from None


def generate_key() -> str:
    """A new key in the format of the setting."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def parse_keys(text: str | None) -> list[bytes]:
    """The comma-separated keys in the setting; raises ValueError with the number of the first invalid one."""
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
                f"key {number} is not {KEY_BYTES} bytes in base64; `openssl rand -base64 {KEY_BYTES}` generates one"
            )
        keys.append(key)
    return keys


def _key_id(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:8]
