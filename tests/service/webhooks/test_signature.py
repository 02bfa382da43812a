"""Webhook signatures: the published test vector, and agreement with the reference library."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import standardwebhooks
from evalstop_service.store.endpoints import generate_secret
from evalstop_service.webhooks import signature
from hypothesis import given
from hypothesis import strategies as st

# Of one length: HMAC pads short keys with zeros, so keys that differ only in trailing zeros are the same key.
keys = st.binary(min_size=32, max_size=32).map(lambda key: "whsec_" + base64.b64encode(key).decode())
bodies = st.text(st.characters(exclude_categories=["Cs"]))
ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


def test_published_vector_is_reproduced() -> None:
    """Signing the Standard Webhooks test vector gives the published signature."""
    signed = signature.sign_body(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(secret=keys, webhook_id=ids, timestamp=st.integers(0, 2**33), body=bodies)
def test_signature_equals_the_reference_library(secret: str, webhook_id: str, timestamp: int, body: str) -> None:
    """Any message gets the signature that the reference library computes."""
    reference = standardwebhooks.Webhook(secret)
    expected = reference.sign(webhook_id, datetime.fromtimestamp(timestamp, UTC), body)
    assert signature.sign_body(secret, webhook_id, timestamp, body.encode()) == expected


@given(secrets=st.lists(keys, min_size=1, max_size=3, unique=True), text=bodies)
def test_every_secret_verifies(secrets: list[str], text: str) -> None:
    """A receiver that knows any one of the valid secrets accepts the message."""
    body = json.dumps({"text": text})
    sent = signature.sign_headers(secrets, "msg_1", int(datetime.now(UTC).timestamp()), body.encode())
    for secret in secrets:
        assert standardwebhooks.Webhook(secret).verify(body, sent) == {"text": text}


def test_new_secrets_differ() -> None:
    """Generated secrets are random, of 32 bytes, in the Standard Webhooks form."""
    secrets = {generate_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert {len(base64.b64decode(secret.removeprefix("whsec_"))) for secret in secrets} == {32}
