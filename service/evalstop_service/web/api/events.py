"""Routes of event schemas, for authors of receivers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import RootModel

from evalstop_service.domain.event_types import EventType
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.context import Read
from evalstop_service.webhooks.events import build_schema

router = APIRouter(prefix="/events", tags=["webhooks"], route_class=JsonRoute)


class EventSchemas(RootModel[dict[str, dict[str, Any]]]):
    """A JSON Schema (2020-12) for each type of event, with an example."""


@router.get("/schemas")
def list_event_schemas(caller: Read) -> EventSchemas:
    """The JSON Schemas (2020-12) of all event types, by type, each with an example."""
    return EventSchemas({event_type: build_schema(event_type) for event_type in EventType})
