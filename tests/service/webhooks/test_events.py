"""Event types: valid schemas, examples that match them, current documentation, sizes and signatures."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import standardwebhooks
from evalstop_service.domain.event_types import EventType
from evalstop_service.store.endpoints import generate_secret
from evalstop_service.webhooks import signature
from evalstop_service.webhooks.channels import Format, render_body
from evalstop_service.webhooks.event_data import MOST_EVENT_BYTES
from evalstop_service.webhooks.events import DECLARATIONS, build_data, build_schema
from hypothesis import given
from hypothesis import strategies as st

from tests.generated_docs import DOCS, GENERATED, replace_part


def test_every_type_is_declared() -> None:
    """A declaration holds a type's schema, its headline and its section in the docs."""
    assert list(DECLARATIONS) == list(EventType)


@pytest.mark.parametrize("event_type", EventType)
def test_schema_accepts_only_its_event_type(event_type: EventType) -> None:
    """A schema is valid in its dialect, accepts its example, and rejects events of another type."""
    schema = build_schema(event_type)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema_rs.meta.validate(schema)
    checker = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    (example,) = schema["examples"]
    checker.validate(example)
    checker.validate(example | {"added": "later"})
    assert not checker.is_valid(example | {"type": "run.other"})
    assert not checker.is_valid(example | {"data": {}})


@pytest.mark.parametrize("name", GENERATED)
def test_generated_docs_are_up_to_date(name: str) -> None:
    """The generated parts of the documentation match the output of `python -m tests.generated_docs`."""
    text = (DOCS / name).read_text()
    assert replace_part(text, GENERATED[name]()) == text, "run `python -m tests.generated_docs`"


def nest(depth: int, width: int) -> Any:
    return {f"key {number}": nest(depth - 1, width) for number in range(width)} if depth else 1.5


REPORTS: dict[str, dict[str, Any]] = {
    "long text": {"log": "x" * 200_000, "exit_status": -15},
    "many entries": {f"pod {number}": "evicted" for number in range(20_000)},
    "nested entries": nest(5, 10),
    "nested lists": {"lists": [[[[0] * 10] * 10] * 10] * 100},
    "long name": {"x" * 200_000: 1},
}


@pytest.mark.parametrize("report", REPORTS)
def test_report_of_any_size_fits_into_an_event(report: str) -> None:
    """The report is left out; the ids of project, run and decision stay, and channels can render it."""
    example = DECLARATIONS[EventType.STOPPED].example
    labels = {f"label {number}": "y" * 45 for number in range(500)}
    run = msgspec.structs.replace(example.run, labels=labels)  # type: ignore[attr-defined]
    fields = msgspec.structs.asdict(example) | {"run": run, "report": REPORTS[report]}
    data = build_data(EventType.STOPPED, fields)
    body = json.dumps({"type": EventType.STOPPED, "timestamp": "2026-01-01T00:00:00Z", "data": data})
    assert len(body) < MOST_EVENT_BYTES
    whole: dict[str, Any] = msgspec.to_builtins(example)
    assert [data[part]["id"] for part in ("project", "run", "decision")] == [
        whole[part]["id"] for part in ("project", "run", "decision")
    ]
    assert data["decision"] == whole["decision"]
    assert data["run"]["labels"] == labels
    for form in Format:
        render_body(form, body)


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
