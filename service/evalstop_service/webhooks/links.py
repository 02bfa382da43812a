"""Where people find what an event is about: said by the event when it is sent. Pure."""

from __future__ import annotations

import json
from uuid import UUID


def locate_run(public_url: str, run_id: UUID) -> str:
    """The page of a run."""
    return f"{public_url}/runs/{run_id}"


def add_url(body: str, public_url: str | None, run_id: UUID) -> str:
    """An event, as JSON, with the page of what it is about as `url`, where it is known how pages are reached."""
    if public_url is None:
        return body
    page = locate_run(public_url, run_id) if body.startswith('{"type":"run.') else f"{public_url}/policies"
    return f'{{"url":{json.dumps(page)},{body[1:]}'
