"""A stop that may still be vetoed."""

from __future__ import annotations

import httpx

from tests.service.web.api.speaking import FALLING, said


def create_pending_decision(client: httpx.Client) -> str:
    """The id of a stop within its veto window."""
    run = said(client.post("/runs", json={"name": "r", "mode": "enforce"}), 201)["id"]
    said(client.post(f"/runs/{run}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    said(client.post(f"/runs/{run}/observations", json={"observations": FALLING}), 200)
    decision = said(client.get("/decisions"), 200)["items"][0]
    assert decision["state"] == "pending"
    return str(decision["id"])
