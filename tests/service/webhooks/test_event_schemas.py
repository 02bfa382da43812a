"""What events look like: schemas that are schemas, examples that are valid, and documentation that shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema_rs
import pytest
from evalstop_service.store.queue.outbox import EVENT_TYPES
from evalstop_service.webhooks import event_schemas

DOCUMENT = Path(__file__).parents[3] / "docs" / "events.md"


def test_every_type_has_a_schema() -> None:
    """There is a schema for each type that one can subscribe to, and for the test of an endpoint."""
    assert set(event_schemas.EVENTS) == {*EVENT_TYPES, event_schemas.TEST}


@pytest.mark.parametrize("event_type", event_schemas.EVENTS)
def test_schemas_are_schemas(event_type: str) -> None:
    """Each is valid by the dialect that it names, takes its example, and refuses what another type looks like."""
    schema = event_schemas.schema(event_type)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema_rs.meta.validate(schema)
    checker = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    (example,) = schema["examples"]
    checker.validate(example)
    checker.validate(example | {"added": "later"})
    assert not checker.is_valid(example | {"type": "run.other"})
    assert not checker.is_valid(example | {"data": {}})


def test_the_document_shows_every_type_as_it_is() -> None:
    """docs/events.md has a heading for each type, and under it what it says and its example."""
    sections = re.split(r"^### ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    shown = {}
    for section in sections:
        name = re.match(r"`([a-z_.]+)`", section)
        block = re.search(r"^```json\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if name and block:
            assert event_schemas.EVENTS[name[1]][1] in section
            shown[name[1]] = json.loads(block[1])
    assert shown == {event_type: event_schemas.example(event_type) for event_type in event_schemas.EVENTS}
