"""A stop that may still be vetoed."""

from __future__ import annotations

import httpx

from tests.service.web.api.api_calls import FALLING, expect_json


def create_pending_decision(client: httpx.Client) -> str:
    """The id of a stop within its veto window."""
    run = expect_json(client.post("/runs", json={"name": "r", "mode": "enforce"}), 201)["id"]
    expect_json(client.post(f"/runs/{run}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    expect_json(client.post(f"/runs/{run}/observations", json={"observations": FALLING}), 200)
    decision = expect_json(client.get("/decisions"), 200)["items"][0]
    assert decision["state"] == "pending"
    return str(decision["id"])
