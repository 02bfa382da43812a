"""Signatures: the published vectors, agreement with the reference library, and what is turned away."""

from __future__ import annotations

import base64
import time
from datetime import UTC, datetime

import pytest
import standardwebhooks
from evalstop_client.errors import (
    ConfigurationError,
    HeaderMissing,
    SignatureError,
    SignatureMismatch,
    TimestampInFuture,
    TimestampMalformed,
    TimestampTooOld,
)
from evalstop_client.signature import sign, verify
from evalstop_service.store.endpoints import generate_key_pair, generate_secret
from evalstop_service.webhooks.signature import sign_headers
from hypothesis import given
from hypothesis import strategies as st

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + base64.b64encode(b"another secret of thirty-two byt").decode()
WEBHOOK_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
TIMESTAMP = 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
PUBLISHED = {"Webhook-Id": WEBHOOK_ID, "Webhook-Timestamp": str(TIMESTAMP), "Webhook-Signature": SIGNATURE}

secrets = st.binary(min_size=1, max_size=64).map(lambda key: "whsec_" + base64.b64encode(key).decode())
ids = st.from_regex(r"\A[A-Za-z0-9_-]{1,40}\Z")
bodies = st.text(st.characters(exclude_categories=["Cs"]))


def test_published_vector_is_signed_as_published() -> None:
    """Our signature of the published message is the published one."""
    assert sign(SECRET, WEBHOOK_ID, TIMESTAMP, BODY)["webhook-signature"] == SIGNATURE


def test_published_vector_is_verified() -> None:
    """The published message verifies, whatever the case of its header names, and tells its id."""
    assert verify([SECRET], PUBLISHED, BODY, now=TIMESTAMP) == WEBHOOK_ID


@given(secrets, ids, bodies)
def test_reference_library_accepts_what_we_sign(secret: str, webhook_id: str, body: str) -> None:
    """What we sign now, the reference library verifies."""
    headers = sign(secret, webhook_id, int(time.time()), body.encode())
    standardwebhooks.Webhook(secret).verify(body, headers, json_parse=False)


@given(secrets, ids, bodies)
def test_we_accept_what_the_reference_library_signs(secret: str, webhook_id: str, body: str) -> None:
    """What the reference library signs, we verify."""
    at = datetime.fromtimestamp(TIMESTAMP, tz=UTC)
    signature = standardwebhooks.Webhook(secret).sign(webhook_id, at, body)
    headers = {"webhook-id": webhook_id, "webhook-timestamp": str(TIMESTAMP), "webhook-signature": signature}
    assert verify([secret], headers, body.encode(), now=TIMESTAMP) == webhook_id


@given(st.binary(), st.integers(0, 2**31), st.floats(-300, 300), ids, secrets, secrets)
def test_signed_is_verified_by_either_of_two_secrets(
    body: bytes, timestamp: int, drift: float, webhook_id: str, old: str, new: str
) -> None:
    """While a secret is being replaced, both are good, within the tolerance on either side."""
    for secret in (old, new):
        assert verify([old, new], sign(secret, webhook_id, timestamp, body), body, timestamp + drift) == webhook_id


@given(st.binary(min_size=1), st.data())
def test_any_changed_bit_is_noticed(body: bytes, data: st.DataObject) -> None:
    """A body with one bit changed is not verified."""
    headers = sign(SECRET, WEBHOOK_ID, TIMESTAMP, body)
    at, bit = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(0, 7))
    changed = body[:at] + bytes([body[at] ^ (1 << bit)]) + body[at + 1 :]
    with pytest.raises(SignatureMismatch):
        verify([SECRET], headers, changed, TIMESTAMP)


@given(st.dictionaries(st.sampled_from(sorted(PUBLISHED)), st.text()), st.binary())
def test_rubbish_is_turned_away_and_never_breaks(headers: dict[str, str], body: bytes) -> None:
    """Whatever the headers hold, the answer is a SignatureError."""
    with pytest.raises(SignatureError):
        verify([SECRET], headers, body, TIMESTAMP)


def test_several_signatures_in_the_header_are_tried_one_by_one() -> None:
    """One good signature among others, unknown versions included, is enough."""
    headers = {**PUBLISHED, "Webhook-Signature": f"v1a,xyz v2,{SIGNATURE} nonsense v1,AAAA {SIGNATURE}"}
    assert verify([OTHER, SECRET], headers, BODY, TIMESTAMP) == WEBHOOK_ID


@given(st.binary(min_size=1), st.data())
def test_signed_by_the_service_is_verified_by_its_public_key(body: bytes, data: st.DataObject) -> None:
    """Who knows the public key alone believes the bytes that the service signed, and none with a bit changed."""
    signing_key, public_key = generate_key_pair()
    secret = generate_secret()
    headers = sign_headers([secret, signing_key], WEBHOOK_ID, TIMESTAMP, body)
    assert verify([public_key], headers, body, TIMESTAMP) == verify([secret], headers, body, TIMESTAMP) == WEBHOOK_ID
    at, bit = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(0, 7))
    changed = body[:at] + bytes([body[at] ^ (1 << bit)]) + body[at + 1 :]
    with pytest.raises(SignatureMismatch):
        verify([public_key], headers, changed, TIMESTAMP)


def test_who_holds_the_secret_cannot_sign_for_the_public_key() -> None:
    """What was signed with the secret, another key, or the public key's own bytes proves nothing by the public key."""
    (_, public_key), (other, _) = generate_key_pair(), generate_key_pair()
    digest_by_public_key = sign("whsec_" + public_key.removeprefix("whpk_"), WEBHOOK_ID, TIMESTAMP, BODY)
    for signatures in (
        SIGNATURE,
        SIGNATURE.replace("v1,", "v1a,"),
        digest_by_public_key["webhook-signature"].replace("v1,", "v1a,"),
        sign_headers([other], WEBHOOK_ID, TIMESTAMP, BODY)["webhook-signature"],
        "v1a, v1a,? v1a,AAAA",
    ):
        with pytest.raises(SignatureMismatch):
            verify([public_key], {**PUBLISHED, "Webhook-Signature": signatures}, BODY, TIMESTAMP)


def test_asymmetric_version_is_not_mistaken_for_ours() -> None:
    """The right digest under another version's name proves nothing."""
    headers = {**PUBLISHED, "Webhook-Signature": SIGNATURE.replace("v1,", "v1a,")}
    with pytest.raises(SignatureMismatch):
        verify([SECRET], headers, BODY, TIMESTAMP)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_missing_header_is_named(name: str) -> None:
    """A webhook without one of the three headers is turned away, and told which."""
    headers = {key: value for key, value in PUBLISHED.items() if key != name}
    with pytest.raises(HeaderMissing, match=name.lower()):
        verify([SECRET], headers, BODY, TIMESTAMP)


@pytest.mark.parametrize(("now", "error"), [(TIMESTAMP + 301, TimestampTooOld), (TIMESTAMP - 301, TimestampInFuture)])
def test_stale_and_future_are_told_apart(now: int, error: type[SignatureError]) -> None:
    """Outside the tolerance a good signature is refused, with the reason that helps."""
    with pytest.raises(error):
        verify([SECRET], PUBLISHED, BODY, now)


@pytest.mark.parametrize("timestamp", ["soon", "1614265330.5", "-1", "1_6", "١٢٣", "9" * 5000])
def test_malformed_timestamp_is_refused(timestamp: str) -> None:
    """A timestamp that is no whole number of seconds is refused, however long it is."""
    with pytest.raises(TimestampMalformed):
        verify([SECRET], {**PUBLISHED, "Webhook-Timestamp": timestamp}, BODY, TIMESTAMP)


def test_wrong_secret_is_a_mismatch() -> None:
    """The same message under another secret does not match; with no secret at all neither."""
    for known in ([OTHER], []):
        with pytest.raises(SignatureMismatch):
            verify(known, PUBLISHED, BODY, TIMESTAMP)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_?!", "whsec_ä"])
def test_malformed_secret_is_a_setting_to_mend(secret: str) -> None:
    """A secret that is no secret is our fault, not the sender's."""
    with pytest.raises(ConfigurationError):
        verify([secret], PUBLISHED, BODY, TIMESTAMP)
