"""Verifies webhooks by Standard Webhooks, with a shared secret. Pure.

The signed content is `{webhook-id}.{webhook-timestamp}.{body}`. It is signed with HMAC-SHA256 and the bytes of the
secret `whsec_<base64>`.
https://github.com/standard-webhooks/standard-webhooks
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

from evalstop_client.errors import ConfigurationError, SignatureError

PREFIX = "whsec_"
VERSION_TAG = "v1"
LONGEST_TIMESTAMP = 15  # digits; a real timestamp has fewer


def verify(
    secrets: Iterable[str], headers: Mapping[str, str], body: bytes, now: float, tolerance_seconds: float = 300
) -> str:
    """Return the webhook's id if it was signed with one of `secrets` within `tolerance_seconds` of `now`.

    Raises a SignatureError otherwise. Several secrets are valid while one replaces another; likewise the header may
    hold several signatures.
    """
    values = {name.lower(): value for name, value in headers.items()}
    webhook_id, timestamp, signatures = (_find_header(values, name) for name in ("id", "timestamp", "signature"))
    if not (timestamp.isascii() and timestamp.isdecimal() and len(timestamp) <= LONGEST_TIMESTAMP):
        raise SignatureError(f"webhook-timestamp is {timestamp!r:.40}, not a whole number of seconds since 1970.")
    age_seconds = now - int(timestamp)
    if abs(age_seconds) > tolerance_seconds:
        age = f"{age_seconds:.0f} s ago" if age_seconds > 0 else f"{-age_seconds:.0f} s in the future"
        raise SignatureError(
            f"It was signed {age}, and {tolerance_seconds:.0f} s are allowed: it may be a replay, or a clock is wrong."
        )
    signed = f"{webhook_id}.{timestamp}.".encode(errors="surrogatepass") + body
    presented = signatures.split()
    if not any(_has_match(secret, signed, presented) for secret in secrets):
        raise SignatureError("No signature matches a secret known here: compare the secret with the endpoint's.")
    return webhook_id


def parse_secret(secret: str) -> bytes:
    """Decode `whsec_<base64>`; raises ConfigurationError if it is malformed."""
    encoded = secret.strip().removeprefix(PREFIX)
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ConfigurationError(
            "webhook secret: it must be whsec_ and base64, as shown when the endpoint was created."
        )
    return key


def _find_header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(f"webhook-{name}", "")
    if not value:
        raise SignatureError(f"The header webhook-{name} is missing.")
    return value


def _has_match(secret: str, signed: bytes, presented: Sequence[str]) -> bool:
    digest = hmac.new(parse_secret(secret), signed, hashlib.sha256).digest()
    expected = f"{VERSION_TAG},".encode() + base64.b64encode(digest)
    return any(hmac.compare_digest(expected, received.encode(errors="replace")) for received in presented)
