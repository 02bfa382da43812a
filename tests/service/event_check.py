"""Holds the events that a test left behind to their schemas."""

from __future__ import annotations

import json
from functools import cache

import jsonschema_rs
import sqlalchemy as sa
from evalstop_service.rules.event_types import EventType
from evalstop_service.store.database import Database
from evalstop_service.store.tables import events
from evalstop_service.webhooks.events import event_schema


def check_events(database: Database) -> None:
    """Fails on the first event in the database that is not as its schema says."""
    with database.reading() as tx:
        found = tx.execute(sa.select(events.c.type, events.c.body)).all()
    for event_type, body in found:
        _checker(event_type).validate(json.loads(body))


@cache
def _checker(event_type: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(event_schema(EventType(event_type)), validate_formats=True)
