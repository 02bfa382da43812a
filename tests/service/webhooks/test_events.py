"""Event types: valid schemas, examples that match them, and documentation that is up to date."""

from __future__ import annotations

import jsonschema_rs
import pytest
from evalstop_service.domain.event_types import EventType
from evalstop_service.webhooks.events import DECLARATIONS, build_schema

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
