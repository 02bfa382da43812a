"""Completes the OpenAPI document: schemas of streams, the media type of problems, and examples."""

from __future__ import annotations

from typing import Any

from evalstop_detectors import describe_document
from fastapi.routing import APIRoute

from evalstop_service.web.api import stream
from evalstop_service.web.api.examples import add_examples
from evalstop_service.web.problems import MEDIA_TYPE, RESPONSES

REFERENCE = "#/components/schemas/{name}"

TAGS = {
    "projects": "Tenants, which own runs, keys, policies and endpoints: settings, and pausing all stops.",
    "keys": "Credentials of trainers, receivers and people.",
    "policies": "Detectors with thresholds, by name and version; backtests on past runs; rollout stages.",
    "runs": "Watched training jobs: open, resume, finish, stop, label.",
    "observations": "Values of metrics: post them in batches, streams, scrapes or reports; read them by step.",
    "eval requests": "Evaluations of the best checkpoint and the current one, requested on suspicion.",
    "checkpoints": "Saved checkpoints of a run, the best of which is to be shipped.",
    "decisions": "Recorded `stop` verdicts: veto, release, undo, receivers' reports, labels.",
    "webhooks": "Endpoints that receive events, deliveries, and events that a receiver fetches.",
    "audit": "Who changed what.",
    "precision": "How often stops were right, and the cases behind these figures.",
    "health": "Probes of the process.",
}
"""The tags that group operations, in the order of the document."""


def name_operation(route: APIRoute) -> str:
    """The id of an operation: the name of its function, a verb and its object, as in `open_run`."""
    return route.name


def complete_openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Complete the document that FastAPI generates; repeating this is harmless."""
    document["components"]["schemas"] |= stream.schemas() | describe_document(REFERENCE)
    for schema in document["components"]["schemas"].values():
        _name_properties(schema)
    add_examples(document["components"]["schemas"])
    for path in document["paths"].values():
        for operation in path.values():
            for status in RESPONSES:
                content = operation["responses"][status]["content"]
                if "application/json" in content:
                    content[MEDIA_TYPE] = content.pop("application/json")
    return document


def _name_properties(schema: Any) -> None:
    """Require in objects with arbitrary names that the names match: `patternProperties` leaves other names
    unrestricted."""
    if isinstance(schema, list):
        for part in schema:
            _name_properties(part)
    if isinstance(schema, dict):
        for part in schema.values():
            _name_properties(part)
        if isinstance(schema.get("patternProperties"), dict):
            ((pattern, values),) = schema.pop("patternProperties").items()
            schema["additionalProperties"] = values
            schema["propertyNames"] = {**schema.get("propertyNames", {}), "pattern": pattern}
