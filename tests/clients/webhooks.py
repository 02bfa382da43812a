"""Stop events as the service sends them, signed and posted over real HTTP."""

from __future__ import annotations

import json
import ssl
import time
from typing import Any

import httpx
from evalstop_service.webhooks.signature import sign_headers

from tests.fixtures.certificates import get_ssl_context

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def make_stop_event(labels: dict[str, str], decision_id: str = "decision-1") -> dict[str, Any]:
    """A `run.stop_requested` event in the documented shape."""
    verdict = {"verdict": "stop", "step": 150, "turn_step": 120, "reason": "3 declines in a row", "evidence": []}
    return {
        "type": "run.stop_requested",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": {
            "project": {"id": "project-1", "name": "demo"},
            "run": {"id": "run-1", "name": "a run", "attempt": 1, "labels": labels},
            "decision": {"id": decision_id, "state": "requested", "step": 150, "due_at": None},
            "verdict": verdict,
            "best_checkpoint": {"step": 120, "uri": "file:///120", "score": 1.0, "chosen_by": "raw_maximum"},
        },
    }


def make_event(event_type: str, labels: dict[str, str], decision_id: str = "decision-1") -> dict[str, Any]:
    """An event of another type about the same run and decision."""
    return {**make_stop_event(labels, decision_id), "type": event_type}


def sign_event(
    event: Any, webhook_id: str = "msg_1", secret: str = SECRET, age_seconds: float = 0
) -> tuple[dict[str, str], bytes]:
    """The headers and the body of a webhook with `event`, an object or the bytes of a body."""
    body = event if isinstance(event, bytes) else json.dumps(event).encode()
    return sign_headers([secret], webhook_id, int(time.time() - age_seconds), body), body


def post_event(
    url: str,
    event: Any,
    webhook_id: str = "msg_1",
    secret: str = SECRET,
    age_seconds: float = 0,
    verify: ssl.SSLContext | None = None,
) -> httpx.Response:
    """Sign and post `event`; `verify` holds the trusted certificates."""
    headers, body = sign_event(event, webhook_id, secret, age_seconds)
    return httpx.post(url, content=body, headers=headers, timeout=20, verify=verify or get_ssl_context())
