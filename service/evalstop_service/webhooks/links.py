"""Links from events to the pages of runs and policies, added when an event is sent. Pure."""

from __future__ import annotations

import json
from uuid import UUID


def locate_run(public_url: str, run_id: UUID) -> str:
    """The URL of a run's page."""
    return f"{public_url}/runs/{run_id}"


def add_url(body: str, public_url: str | None, run_id: UUID) -> str:
    """Add the page of the run or policy to a JSON event as `url`; without a public URL the event stays as it is."""
    if public_url is None:
        return body
    page = locate_run(public_url, run_id) if body.startswith('{"type":"run.') else f"{public_url}/policies"
    return f'{{"url":{json.dumps(page)},{body[1:]}'
