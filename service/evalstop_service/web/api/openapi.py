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
    "projects": "What runs, keys, policies and endpoints belong to: settings, and the pause of all stopping.",
    "keys": "What trainers, receivers and people prove themselves by.",
    "policies": "Detectors with thresholds, by name and version; backtests on past runs; rollout stages.",
    "runs": "Training jobs that are watched: opened, resumed, finished, stopped, labeled.",
    "observations": "Values of metrics: sent in batches, in streams, as scrapes or reports, and read by step.",
    "eval requests": "Evaluations of the best checkpoint and the current one that a suspicion asks for.",
    "checkpoints": "What a run saved, of which the best is to be shipped.",
    "decisions": "Verdicts to stop on record: veto, release, undo, reports of receivers, labels.",
    "webhooks": "Endpoints that events go to, deliveries, and events that a receiver fetches.",
    "audit": "Who changed what.",
    "precision": "How often stops were right, and the cases that say so.",
    "health": "Probes of the process.",
}
"""What operations are grouped by, in the order of the document."""


def name_operation(route: APIRoute) -> str:
    """The id of an operation: the name of its function, a verb and its object, as in `open_run`."""
    return route.name


def complete_openapi(document: dict[str, Any]) -> dict[str, Any]:
    """The document that FastAPI generates, completed; completing it twice is harmless."""
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
    """Say of objects with names of the sender's own that these names have to match, which `patternProperties` does not:
    it leaves what does not match without a rule."""
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
