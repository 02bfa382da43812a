"""Validates the events that a test left in the database."""

from __future__ import annotations

import json
from functools import cache

import jsonschema_rs
import sqlalchemy as sa
from evalstop_service.domain.event_types import EventType
from evalstop_service.store.database import Database
from evalstop_service.store.tables import events
from evalstop_service.webhooks.events import build_schema


def check_events(database: Database) -> None:
    """Validate all events in the database against their schemas; raise at the first invalid one."""
    with database.reading() as tx:
        rows = tx.execute(sa.select(events.c.type, events.c.body)).all()
    for event_type, body in rows:
        _schema_validator(event_type).validate(json.loads(body))


@cache
def _schema_validator(event_type: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(build_schema(EventType(event_type)), validate_formats=True)
