"""Verifies webhooks by Standard Webhooks: `v1` with a shared secret, `v1a` with a public key. Pure.

The signed content is `{webhook-id}.{webhook-timestamp}.{body}`. It is signed with HMAC-SHA256 and the bytes of the
secret `whsec_<base64>`, or with the Ed25519 key whose public half is `whpk_<base64>`.
https://github.com/standard-webhooks/standard-webhooks
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from evalstop_client.errors import ConfigurationError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PREFIX, PUBLIC_PREFIX = "whsec_", "whpk_"
VERSION_TAG, KEY_PAIR_TAG = "v1", "v1a"
MOST_SIGNATURES = 16
"""The most signatures that are checked: a real webhook has three, and each takes time."""
LONGEST_TIMESTAMP = 15  # digits; a real timestamp has fewer


def verify(
    secrets: Iterable[str], headers: Mapping[str, str], body: bytes, now: float, tolerance_seconds: float = 300
) -> str:
    """Return the webhook's id if it was signed with one of `secrets` within `tolerance_seconds` of `now`.

    A secret is `whsec_...`, or the signer's public key `whpk_...`, which needs evalstop-client[signatures].
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
    presented = signatures.split()[:MOST_SIGNATURES]
    if not any(_has_match(secret, signed, presented) for secret in secrets):
        raise SignatureError("No signature matches a secret known here: compare the secret with the endpoint's.")
    return webhook_id


def check_secret(secret: str) -> None:
    """Raise ConfigurationError unless this is a secret, or a public key that can be used here."""
    (_load_public_key if secret.startswith(PUBLIC_PREFIX) else parse_secret)(secret)


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
    if secret.startswith(PUBLIC_PREFIX):
        key, tag = _load_public_key(secret), f"{KEY_PAIR_TAG},"
        return any(_is_signed_by(key, signed, item.removeprefix(tag)) for item in presented if item.startswith(tag))
    digest = hmac.new(parse_secret(secret), signed, hashlib.sha256).digest()
    expected = f"{VERSION_TAG},".encode() + base64.b64encode(digest)
    return any(hmac.compare_digest(expected, received.encode(errors="replace")) for received in presented)


def _is_signed_by(key: Ed25519PublicKey, signed: bytes, signature: str) -> bool:
    from cryptography.exceptions import InvalidSignature  # is there, where a key is

    try:
        key.verify(base64.b64decode(signature, validate=True), signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def _load_public_key(text: str) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # an extra: most have a secret
    except ImportError:
        raise ConfigurationError("public key: install evalstop-client[signatures] to verify with one.") from None
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text.removeprefix(PUBLIC_PREFIX), validate=True))
    except ValueError:
        raise ConfigurationError("public key: it must be whpk_ and base64, as the endpoint shows it.") from None
