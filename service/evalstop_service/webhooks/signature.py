"""Signs a webhook as Standard Webhooks says (symmetric, version 1). Pure.

Source: https://www.standardwebhooks.com, section "Signature scheme". Signed is `{id}.{timestamp}.{body}` with
HMAC-SHA256 under the bytes that the secret holds in base64; a header may carry several signatures, so that a secret can
be replaced while receivers still know the one before.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence
from functools import lru_cache

PREFIX = "whsec_"


def sign_body(secret: str, webhook_id: str, timestamp: int, body: bytes) -> str:
    """The signature `v1,<base64>` under one secret; `timestamp` in Unix seconds. ValueError: not a secret."""
    content = f"{webhook_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(_key(secret), content, "sha256")).decode()


def sign_headers(secrets: Sequence[str], webhook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of a webhook, signed under every secret that is valid now."""
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(sign_body(secret, webhook_id, timestamp, body) for secret in secrets),
    }


@lru_cache(maxsize=1024)  # a busy endpoint's is asked for again and again
def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a signing secret is {PREFIX} and base64, which this one is not ({error})") from None
    if not key:
        raise ValueError(f"a signing secret is {PREFIX} and base64, and this one is empty")
    return key
