"""Completes the OpenAPI document: schemas of streams, the media type of problems, and examples."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api import stream
from evalstop_service.web.api.examples import add_examples
from evalstop_service.web.problems import MEDIA_TYPE, RESPONSES


def complete_openapi(document: dict[str, Any]) -> dict[str, Any]:
    """The document that FastAPI generates, completed; completing it twice is harmless."""
    document["components"]["schemas"] |= stream.schemas()
    add_examples(document["components"]["schemas"])
    for path in document["paths"].values():
        for operation in path.values():
            for status in RESPONSES:
                content = operation["responses"][status]["content"]
                if "application/json" in content:
                    content[MEDIA_TYPE] = content.pop("application/json")
    return document
