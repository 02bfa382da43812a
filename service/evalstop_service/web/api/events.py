"""Routes of event schemas, for authors of receivers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import RootModel

from evalstop_service.errors import NotFound
from evalstop_service.rules.event_types import EventType
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.context import Read
from evalstop_service.webhooks.events import build_schema

router = APIRouter(prefix="/events", tags=["webhooks"], route_class=JsonRoute)


class EventSchema(RootModel[dict[str, Any]]):
    """A JSON Schema (2020-12) with an example."""


class EventSchemas(RootModel[dict[str, EventSchema]]):
    """A JSON Schema for each type of event."""


@router.get("/schemas")
def list_event_schemas(caller: Read) -> EventSchemas:
    """The JSON Schemas (2020-12) of all event types, by type, each with an example."""
    return EventSchemas({event_type: EventSchema(build_schema(event_type)) for event_type in EventType})


@router.get("/schemas/{event_type}")
def get_event_schema(event_type: Annotated[str, Path(description="such as run.stopped")], caller: Read) -> EventSchema:
    """The JSON Schema (2020-12) of one type of event, with an example."""
    if event_type not in list(EventType):
        raise NotFound(f"there is no event {event_type!r}; the types are {', '.join(EventType)}")
    return EventSchema(build_schema(EventType(event_type)))
