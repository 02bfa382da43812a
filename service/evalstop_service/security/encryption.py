"""Encrypts the webhook secrets in the database, so that a copy of the database reveals none of them.

By Fernet, with the endpoint's id before each secret, so that one that was copied to another row cannot be used there.
The stored form is `encrypted:` and Fernet's token. A secret without that prefix is plain text.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from evalstop_service.errors import ServiceError

SETTING = "EVALSTOP_SECRET_KEYS"
PREFIX = "encrypted:"
KEY_BYTES = 32


class UnreadableSecret(ServiceError):
    """No configured key decrypts a webhook secret. Deliveries signed with it wait."""


class Encryption:
    """Encrypts with the first key and decrypts with any; without a key, secrets are stored as plain text."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._fernet = MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys]) if keys else None

    @property
    def has_key(self) -> bool:
        """Whether secrets are encrypted."""
        return self._fernet is not None

    def encrypt(self, secret: str, endpoint_id: UUID) -> str:
        """The secret of an endpoint as the database stores it."""
        if self._fernet is None:
            return secret
        return PREFIX + self._fernet.encrypt(f"{endpoint_id}:{secret}".encode()).decode()

    def decrypt(self, stored: str, endpoint_id: UUID) -> str:
        """The secret of an endpoint; raises UnreadableSecret."""
        if not stored.startswith(PREFIX):
            return stored
        owner = secret = ""
        if self._fernet is not None:
            with suppress(InvalidToken):
                owner, _, secret = self._fernet.decrypt(stored.removeprefix(PREFIX)).decode().partition(":")
        if owner != str(endpoint_id):
            raise UnreadableSecret(
                f"no key in {SETTING} decrypts a secret of endpoint {endpoint_id}: add the key that encrypted it, or "
                "rotate the secret if it was changed in the database"
            )
        return secret


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
