"""Signatures: the published vector, agreement with the reference library, and refusals."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
import standardwebhooks
from evalstop_client.errors import ConfigurationError, SignatureError
from evalstop_client.signature import verify
from evalstop_service.store.endpoints import generate_key_pair, generate_secret
from evalstop_service.webhooks.signature import sign_headers
from hypothesis import given
from hypothesis import strategies as st

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER_SECRET = "whsec_" + base64.b64encode(b"another secret of thirty-two byt").decode()
WEBHOOK_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
TIMESTAMP = 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
PUBLISHED = {"Webhook-Id": WEBHOOK_ID, "Webhook-Timestamp": str(TIMESTAMP), "Webhook-Signature": SIGNATURE}

secrets = st.binary(min_size=1, max_size=64).map(lambda key: "whsec_" + base64.b64encode(key).decode())
ids = st.from_regex(r"\A[A-Za-z0-9_-]{1,40}\Z")
bodies = st.text(st.characters(exclude_categories=["Cs"]))


def test_published_vector_is_verified() -> None:
    """The published message verifies in any case of its header names, and gives its id."""
    assert verify([SECRET], PUBLISHED, BODY, now=TIMESTAMP) == WEBHOOK_ID


@given(secrets, ids, bodies)
def test_signatures_of_the_reference_library_verify(secret: str, webhook_id: str, body: str) -> None:
    """We verify any message that the reference library signs."""
    at = datetime.fromtimestamp(TIMESTAMP, tz=UTC)
    signature = standardwebhooks.Webhook(secret).sign(webhook_id, at, body)
    headers = {"webhook-id": webhook_id, "webhook-timestamp": str(TIMESTAMP), "webhook-signature": signature}
    assert verify([secret], headers, body.encode(), now=TIMESTAMP) == webhook_id


@given(st.binary(), st.integers(0, 2**31), st.floats(-300, 300), ids, secrets, secrets)
def test_both_secrets_verify_during_rotation(
    body: bytes, timestamp: int, drift: float, webhook_id: str, old: str, new: str
) -> None:
    """During a rotation both secrets verify, within the tolerance before and after."""
    for secret in (old, new):
        assert (
            verify([old, new], sign_headers([secret], webhook_id, timestamp, body), body, timestamp + drift)
            == webhook_id
        )


@given(st.dictionaries(st.sampled_from(sorted(PUBLISHED)), st.text()), st.binary())
def test_any_headers_verify_or_raise_a_signature_error(headers: dict[str, str], body: bytes) -> None:
    """Any header values give a SignatureError, and no other exception."""
    with pytest.raises(SignatureError):
        verify([SECRET], headers, body, TIMESTAMP)


def test_one_valid_signature_among_others_is_enough() -> None:
    """Unknown versions and invalid signatures beside a valid one are ignored."""
    headers = {**PUBLISHED, "Webhook-Signature": f"v1a,xyz v2,{SIGNATURE} nonsense v1,AAAA {SIGNATURE}"}
    assert verify([OTHER_SECRET, SECRET], headers, BODY, TIMESTAMP) == WEBHOOK_ID


@given(st.binary(min_size=1), st.data())
def test_service_signatures_verify(body: bytes, data: st.DataObject) -> None:
    """Secret and public key verify what the service signs, and nothing with a changed bit."""
    signing_key, public_key = generate_key_pair()
    secret = generate_secret()
    headers = sign_headers([secret, signing_key], WEBHOOK_ID, TIMESTAMP, body)
    assert verify([public_key], headers, body, TIMESTAMP) == verify([secret], headers, body, TIMESTAMP) == WEBHOOK_ID
    at, bit = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(0, 7))
    changed = body[:at] + bytes([body[at] ^ (1 << bit)]) + body[at + 1 :]
    for key in (secret, public_key):
        with pytest.raises(SignatureError, match="No signature"):
            verify([key], headers, changed, TIMESTAMP)


def test_who_holds_the_secret_cannot_sign_for_the_public_key() -> None:
    """Signatures by the secret, another key, or the public key's bytes do not verify with the public key."""
    (_, public_key), (other, _) = generate_key_pair(), generate_key_pair()
    digest_by_public_key = sign_headers(["whsec_" + public_key.removeprefix("whpk_")], WEBHOOK_ID, TIMESTAMP, BODY)
    for signatures in (
        SIGNATURE,
        SIGNATURE.replace("v1,", "v1a,"),
        digest_by_public_key["webhook-signature"].replace("v1,", "v1a,"),
        sign_headers([other], WEBHOOK_ID, TIMESTAMP, BODY)["webhook-signature"],
        "v1a, v1a,? v1a,AAAA",
    ):
        with pytest.raises(SignatureError, match="No signature"):
            verify([public_key], {**PUBLISHED, "Webhook-Signature": signatures}, BODY, TIMESTAMP)


def test_digest_under_another_version_is_a_mismatch() -> None:
    """The right digest with the version v1a does not verify."""
    headers = {**PUBLISHED, "Webhook-Signature": SIGNATURE.replace("v1,", "v1a,")}
    with pytest.raises(SignatureError, match="No signature"):
        verify([SECRET], headers, BODY, TIMESTAMP)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_missing_header_is_named(name: str) -> None:
    """The error of a missing header names it."""
    headers = {key: value for key, value in PUBLISHED.items() if key != name}
    with pytest.raises(SignatureError, match=f"{name.lower()} is missing"):
        verify([SECRET], headers, BODY, TIMESTAMP)


@pytest.mark.parametrize(("now", "message"), [(TIMESTAMP + 301, "301 s ago"), (TIMESTAMP - 301, "301 s in the future")])
def test_old_and_future_timestamps_are_refused(now: int, message: str) -> None:
    """A valid signature outside the tolerance is refused, and the error says by how much."""
    with pytest.raises(SignatureError, match=message):
        verify([SECRET], PUBLISHED, BODY, now)


@pytest.mark.parametrize("timestamp", ["soon", "1614265330.5", "-1", "1_6", "١٢٣", "9" * 5000])
def test_malformed_timestamp_is_refused(timestamp: str) -> None:
    """A timestamp that is not a whole number of seconds is refused, whatever its length."""
    with pytest.raises(SignatureError, match="not a whole number"):
        verify([SECRET], {**PUBLISHED, "Webhook-Timestamp": timestamp}, BODY, TIMESTAMP)


def test_wrong_secret_is_a_mismatch() -> None:
    """Another secret, or none, does not verify."""
    for secrets_known in ([OTHER_SECRET], []):
        with pytest.raises(SignatureError, match="No signature"):
            verify(secrets_known, PUBLISHED, BODY, TIMESTAMP)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_?!", "whsec_ä"])
def test_malformed_secret_is_a_configuration_error(secret: str) -> None:
    """A malformed secret is the receiver's error, not the sender's."""
    with pytest.raises(ConfigurationError):
        verify([secret], PUBLISHED, BODY, TIMESTAMP)
