"""The OpenAPI document as it is handed out: with the media type that problems really have, and with examples."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api import stream
from evalstop_service.web.api.examples import EXAMPLES
from evalstop_service.web.problems import MEDIA_TYPE, RESPONSES


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """The document that FastAPI makes of the routes, with what it cannot know; doing it twice is harmless."""
    document["components"]["schemas"] |= stream.schemas()
    for name, example in EXAMPLES.items():
        document["components"]["schemas"][name]["examples"] = [example]
    for path in document["paths"].values():
        for operation in path.values():
            for status in RESPONSES:
                content = operation["responses"][status]["content"]
                if "application/json" in content:
                    content[MEDIA_TYPE] = content.pop("application/json")
    return document
