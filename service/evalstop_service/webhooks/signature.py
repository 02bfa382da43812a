"""Signs webhooks by Standard Webhooks: `v1` with a shared secret, `v1a` with a key pair. Pure.

Source: https://www.standardwebhooks.com, section "Signature scheme". The signed content is `{id}.{timestamp}.{body}`. A
secret is `whsec_` and base64 and signs with HMAC-SHA256; a key is `whsk_` and base64 and signs with Ed25519. A header
may carry several signatures, so that a secret can be replaced while receivers still use the previous one.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX, SIGNING_PREFIX = "whsec_", "whsk_"


def sign_body(secret: str, webhook_id: str, timestamp: int, body: bytes) -> str:
    """The signature `v1,<base64>` by a secret, or `v1a,<base64>` by a signing key; `timestamp` in Unix seconds."""
    content = f"{webhook_id}.{timestamp}.".encode() + body
    if secret.startswith(SIGNING_PREFIX):
        return "v1a," + base64.b64encode(_load_signing_key(secret).sign(content)).decode()
    return "v1," + base64.b64encode(hmac.digest(_decode_key(secret), content, "sha256")).decode()


def sign_headers(secrets: Sequence[str], webhook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of a webhook, signed with every currently valid secret."""
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(sign_body(secret, webhook_id, timestamp, body) for secret in secrets),
    }


@lru_cache(maxsize=1024)  # a busy endpoint uses the same key many times
def _decode_key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix(PREFIX))


@lru_cache(maxsize=1024)
def _load_signing_key(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(base64.b64decode(text.removeprefix(SIGNING_PREFIX)))
