"""Signatures: the published vector, and agreement with the reference library."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import pytest
import standardwebhooks
from evalstop_service.store.endpoints import generate_secret, select_valid_secrets
from evalstop_service.webhooks import signature
from hypothesis import given
from hypothesis import strategies as st

# Of one length: HMAC fills short keys up with zeros, so keys that differ in trailing zeros alone are the same key.
keys = st.binary(min_size=32, max_size=32).map(lambda key: "whsec_" + base64.b64encode(key).decode())
bodies = st.text(st.characters(exclude_categories=["Cs"]))
ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


def test_published_vector() -> None:
    """The vector published with Standard Webhooks comes out as published."""
    signed = signature.sign_body(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(secret=keys, webhook_id=ids, timestamp=st.integers(0, 2**33), body=bodies)
def test_agrees_with_the_reference(secret: str, webhook_id: str, timestamp: int, body: str) -> None:
    """Any message is signed exactly as the reference library signs it."""
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


def test_another_secret_does_not_verify() -> None:
    """A receiver that knows none of the secrets refuses the message."""
    sent = signature.sign_headers(
        [generate_secret(), generate_secret()], "msg_1", int(datetime.now(UTC).timestamp()), b"{}"
    )
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(generate_secret()).verify("{}", sent)


@given(first=keys, second=keys, one=bodies, other=bodies)
def test_depends_on_all(first: str, second: str, one: str, other: str) -> None:
    """Two messages have one signature only when secret and body are the same."""
    same = signature.sign_body(first, "m", 1, one.encode()) == signature.sign_body(second, "m", 1, other.encode())
    assert same == (first == second and one == other)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_not base64!", "whsec_YQ", "plain", "whsk_YQ=="])
def test_refuses_what_is_no_secret(secret: str) -> None:
    """A broken secret is an error, and never an empty key."""
    with pytest.raises(ValueError, match=r"signing secret|bytes"):
        signature.sign_body(secret, "m", 1, b"{}")


def test_new_secrets_differ() -> None:
    """Secrets are random, of 32 bytes, and of the form that Standard Webhooks asks for."""
    made = {generate_secret() for _ in range(100)}
    assert len(made) == 100
    assert {len(base64.b64decode(secret.removeprefix("whsec_"))) for secret in made} == {32}


def test_the_previous_secret_expires() -> None:
    """The secret before signs along until its time is over, and not at that moment."""
    until = datetime(2026, 1, 2, tzinfo=UTC)
    just_before = datetime(2026, 1, 1, 23, 59, 59, tzinfo=UTC)
    assert select_valid_secrets("new", "old", until, "key", just_before) == ("new", "old", "key")
    assert select_valid_secrets("new", "old", until, "key", until) == ("new", "key")
    assert select_valid_secrets("new", None, None, "key", until) == ("new", "key")
