"""Endpoints, and what is delivered to them."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api.examples.story import BEGAN, DECISION_ID, RUN_ID, STOPPED, page

ENDPOINT_ID = "0199aa0f-55aa-7c01-b1c2-0f1e2d3c4b5a"
SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"  # noqa: S105 - an example
ENDPOINT = {
    "id": ENDPOINT_ID,
    "url": "https://receiver.example:8788/",
    "event_types": ["run.stop_requested"],
    "format": "standard",
    "enabled": True,
    "created_at": BEGAN,
    "failures": 0,
    "open_until": None,
    "previous_secret_until": None,
}
DELIVERY = {
    "id": "0199aa12-4444-7a55-8b66-0a0b0c0d0e0f",
    "run_id": RUN_ID,
    "event_id": "0199aa12-5555-7b66-9c77-f0e0d0c0b0a0",
    "event_type": "run.stop_requested",
    "decision_id": DECISION_ID,
    "endpoint_id": ENDPOINT_ID,
    "url": ENDPOINT["url"],
    "state": "delivered",
    "attempts": 1,
    "due_at": "2026-01-01T14:32:07.260000Z",
    "last_error": None,
    "created_at": STOPPED,
    "settled_at": "2026-01-01T14:31:07.300000Z",
    "log": [
        {"number": 1, "at": "2026-01-01T14:31:07.300000Z", "duration_ms": 12.5, "status_code": 200, "error": None}
        | {"url": ENDPOINT["url"], "answer": "ok"}
    ],
}
EVENT_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "run.stopped",
    "type": "object",
    "required": ["type", "timestamp", "data"],
}

EXAMPLES: dict[str, Any] = {
    "EndpointIn": {"url": ENDPOINT["url"], "event_types": ENDPOINT["event_types"]},
    "EndpointOut": ENDPOINT,
    "EndpointList": {"items": [ENDPOINT]},
    "EndpointChange": {"enabled": False},
    "EndpointWithSecret": ENDPOINT | {"secret": SECRET},
    "TestOut": {
        "event_id": DELIVERY["event_id"],
        "url": ENDPOINT["url"],
        "delivered": True,
        "status_code": 200,
        "error": None,
        "answer": "ok",
        "duration_ms": 12.5,
    },
    "DeliveryOut": DELIVERY,
    "DeliveryDetail": DELIVERY
    | {
        "request": {
            "method": "POST",
            "url": ENDPOINT["url"],
            "headers": {"content-type": "application/json", "webhook-id": DELIVERY["event_id"]},
            "body": '{"type":"run.stop_requested","timestamp":"2026-01-01T14:31:07.250000Z","data":{}}',
        }
    },
    "DeliveryPage": page(DELIVERY),
    "ReplayIn": {"since": BEGAN, "types": ["run.stopped"]},
    "ReplayOut": {"replayed": 12, "passed_over": 0, "next_after": None},
    "PullEndpointIn": {
        "name": "login-node",
        "event_types": ["run.stop_requested", "run.stop_escalated", "run.resume_requested"],
    },
    "ClaimIn": {"wait_seconds": 25, "limit": 10, "lease_seconds": 30},
    "PulledEvents": {
        "events": [
            {
                "delivery_id": DELIVERY["id"],
                "attempt": 1,
                "lease_until": "2026-01-01T14:31:37.300000Z",
                "headers": {
                    "webhook-id": DELIVERY["event_id"],
                    "webhook-timestamp": "1767277867",
                    "webhook-signature": "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=",
                },
                "body": '{"type":"run.stop_requested","timestamp":"2026-01-01T14:31:07.250000Z","data":{}}',
            }
        ]
    },
    "SettleIn": {"delivery_id": DELIVERY["id"], "attempt": 1, "status": 202},
    "Settlement": {"settled": True},
    "EventSchema": EVENT_SCHEMA,
    "EventSchemas": {"run.stopped": EVENT_SCHEMA},
}
