"""Signs and verifies webhooks by Standard Webhooks (symmetric, `v1`). Pure.

Signed is `{webhook-id}.{webhook-timestamp}.{body}`, by HMAC-SHA256 with the bytes that the secret `whsec_<base64>`
stands for. https://github.com/standard-webhooks/standard-webhooks
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping

from evalstop_client.errors import (
    ConfigurationError,
    HeaderMissing,
    SignatureMismatch,
    TimestampInFuture,
    TimestampMalformed,
    TimestampTooOld,
)

PREFIX = "whsec_"
VERSION_TAG = "v1"
LONGEST_TIMESTAMP = 15  # digits; more are no time, and only cost


def sign(secret: str, webhook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers that prove `body` to a holder of `secret`; `timestamp` in seconds since 1970."""
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": _signature(secret_bytes(secret), webhook_id, str(timestamp), body),
    }


def verify(
    secrets: Iterable[str],
    headers: Mapping[str, str],
    body: bytes,
    now: float,
    tolerance_seconds: float = 300,
) -> str:
    """Return the webhook's id if it was signed with one of `secrets` within `tolerance_seconds` of `now`.

    Raises a SignatureError otherwise. Several secrets are valid at a time while one replaces the other; the header may
    likewise hold several signatures.
    """
    given = {name.lower(): value for name, value in headers.items()}
    webhook_id, timestamp, signatures = (_header(given, name) for name in ("id", "timestamp", "signature"))
    if not (timestamp.isascii() and timestamp.isdecimal() and len(timestamp) <= LONGEST_TIMESTAMP):
        raise TimestampMalformed(f"It is {timestamp!r:.40}.")
    age_seconds = now - int(timestamp)
    if age_seconds > tolerance_seconds:
        raise TimestampTooOld(f"It is {age_seconds:.0f} s old; at most {tolerance_seconds:.0f} s are allowed.")
    if age_seconds < -tolerance_seconds:
        raise TimestampInFuture(f"It is {-age_seconds:.0f} s ahead; at most {tolerance_seconds:.0f} s are allowed.")
    expected = [_signature(secret_bytes(secret), webhook_id, timestamp, body).encode() for secret in secrets]
    presented = [signature.encode(errors="replace") for signature in signatures.split()]
    matches = [hmac.compare_digest(mine, theirs) for mine in expected for theirs in presented]
    if not any(matches):
        raise SignatureMismatch
    return webhook_id


def secret_bytes(secret: str) -> bytes:
    """The bytes that `whsec_<base64>` stands for; ConfigurationError when it stands for none."""
    encoded = secret.strip().removeprefix(PREFIX)
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ConfigurationError("webhook secret: it must be whsec_ and base64, as shown when the endpoint was made.")
    return key


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(f"webhook-{name}", "")
    if not value:
        raise HeaderMissing(f"There is no webhook-{name}.")
    return value


def _signature(key: bytes, webhook_id: str, timestamp: str, body: bytes) -> str:
    signed = f"{webhook_id}.{timestamp}.".encode(errors="surrogatepass") + body
    return f"{VERSION_TAG}," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
