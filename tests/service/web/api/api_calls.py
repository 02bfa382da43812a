"""Requests of the API's tests: a body for every route, and checks of the responses."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx
from evalstop_service.web.problem_kinds import ProblemKind

from tests.fixtures.subscriptions import EVERY_EVENT

FALLING = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate([0.5, 0.9, 0.8, 0.7, 0.6])]
"""Three declines: the policy `paper` stops at step 4."""

ENDPOINT = {"url": "http://127.0.0.1:9/", "event_types": EVERY_EVENT, "format": "standard"}

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/projects"): {
        "name": "p",
        "default_policy": "paper",
        "default_mode": "shadow",
        "veto_window_seconds": 1.5,
        "stops_per_hour": 10,
        "stops_share": 0.25,
        "confirm_seconds": 60.0,
        "stale_seconds": 600.0,
        "held_out_share": 0.2,
        "second_person": False,
        "case_seconds": 60.0,
        "case_evals": 3,
        "case_gpu_hours": 0.5,
        "cases_per_key_and_day": 5,
        "price_per_gpu_hour": 2.5,
        "currency": "EUR",
    },
    ("PUT", "/projects/{project_id}/quotas"): {
        "open_runs": 20_000,
        "runs_per_day": 60_000,
        "metrics_per_run": 6_000,
        "keys": 2_000,
        "endpoints": 300,
        "policies": 2_000,
    },
    ("PATCH", "/project"): {
        "default_policy": "paper",
        "default_mode": "shadow",
        "veto_window_seconds": 1.5,
        "stops_per_hour": 10,
        "stops_share": 0.25,
        "confirm_seconds": 60.0,
        "stale_seconds": 600.0,
        "held_out_share": 0.0,
        "second_person": False,
        "case_seconds": 60.0,
        "case_evals": 3,
        "case_gpu_hours": 0.5,
        "cases_per_key_and_day": 5,
        "price_per_gpu_hour": 2.5,
        "currency": "EUR",
    },
    ("POST", "/project/pause"): {"actor": "dana", "reason": "the eval set is broken"},
    ("POST", "/project/resume"): {"actor": "dana"},
    ("PUT", "/project/role-patterns"): {
        "role_patterns": [{"pattern": "val-core/*/mean@*", "role": "eval", "direction": "maximize"}]
    },
    ("POST", "/keys"): {
        "name": "k",
        "scopes": ["report"],
        "expires_at": "2126-01-01T00:00:00Z",
        "networks": ["127.0.0.0/8"],
        "endpoint_ids": [],
    },
    ("POST", "/keys/{key_id}/rotate"): {"overlap_seconds": 60.0},
    ("POST", "/projects/{project_id}/keys"): {
        "name": "k",
        "scopes": ["ingest"],
        "expires_at": None,
        "networks": [],
        "endpoint_ids": [],
    },
    ("POST", "/policies"): {
        "name": "patient",
        "description": "d",
        "members": [{"detector": "k_decline", "params": {"k": 7}, "suspect_at": 3.0, "stop_at": 7.0}],
        "at_least": 1,
        "eval_required": True,
        "min_evals": 10,
        "warmup_steps": 5,
    },
    ("PUT", "/policies/{name}/rollout-stage"): {"required_precision": 0.9, "canary_share": 0.25},
    ("POST", "/policies/{name}/rollout-stage/demote"): {"reason": "it stopped a good run"},
    ("POST", "/policies/backtests"): {"policy": "paper", "runs": 10},
    ("POST", "/runs"): {
        "name": "r",
        "metrics": {"gold": {"role": "eval", "direction": "maximize"}},
        "labels": {"job": "1"},
        "policy": "paper",
        "mode": "enforce",
        "total_steps": 100,
        "params": {"optimizer.lr": "1e-6"},
        "eval_share": 0.0,
        "owner": "dana@example.org",
        "group": "ppo-7b",
        "tags": ["baseline"],
        "notes": "n",
    },
    ("PATCH", "/runs/{run_id}"): {"owner": "dana", "group": "ppo-7b", "tags": ["baseline"], "notes": "two\nlines"},
    ("PATCH", "/runs/{run_id}/metrics"): {"metrics": {"gold": {"role": "eval", "direction": "maximize"}}},
    ("POST", "/runs/{run_id}/resume"): {"step": 3},
    ("POST", "/runs/{run_id}/eval-changes"): {"step": 3, "reason": "another grader"},
    ("POST", "/runs/{run_id}/stop"): {"actor": "dana", "reason": "it diverged"},
    ("POST", "/runs/{run_id}/finish"): {"status": "completed"},
    ("POST", "/runs/{run_id}/outcome"): {"outcome": "wrong", "note": "n", "turn_step": 1, "actor": "dana"},
    ("POST", "/runs/{run_id}/observations"): {
        "observations": [
            {"metric": "eval", "step": 1, "value": 0.5, "stderr": 0.1, "time": "2026-01-01T00:00:00Z"},
        ]
    },
    ("POST", "/kubeflow/{name}"): {"trainerStatus": {"metrics": [{"name": "eval_loss", "value": "0.61"}]}},
    ("POST", "/runs/{run_id}/checkpoints"): {"step": 1, "uri": "file:///1"},
    ("POST", "/runs/{run_id}/eval-requests/{request_id}/answer"): {"difference": -0.1, "stderr": 0.1, "prompts": 800},
    ("POST", "/decisions/{decision_id}/veto"): {"actor": "dana", "reason": "broken eval"},
    ("POST", "/decisions/{decision_id}/release"): {"actor": "dana", "reason": "a known dip"},
    ("POST", "/decisions/{decision_id}/undo"): {"actor": "dana", "reason": "broken eval"},
    ("POST", "/decisions/{decision_id}/report"): {
        "state": "acknowledged",
        "actor": "receiver",
        "reason": "r",
        "details": {"job": "4711"},
        "expected_seconds": 120.0,
    },
    ("POST", "/decisions/{decision_id}/outcome"): {"outcome": "right", "note": "n", "turn_step": 1, "actor": "dana"},
    ("POST", "/endpoints"): ENDPOINT,
    ("PATCH", "/endpoints/{endpoint_id}"): ENDPOINT | {"enabled": True},
    ("POST", "/endpoints/{endpoint_id}/replay"): {
        "since": "2026-01-01T00:00:00Z",
        "until": "2026-01-02T00:00:00Z",
        "types": ["run.stopped"],
        "after": "01900000-0000-7000-8000-000000000000",
    },
    ("POST", "/pull/endpoints"): {"name": "login-node", "event_types": ["run.stop_failed"]},
    ("POST", "/pull/endpoints/{endpoint_id}/claim"): {"wait_seconds": 0.0, "limit": 1, "lease_seconds": 5.0},
    ("POST", "/pull/endpoints/{endpoint_id}/settle"): {
        "delivery_id": "01900000-0000-7000-8000-000000000000",
        "attempt": 1,
        "status": 200,
        "error": "",
    },
}
"""A valid body with every field, for each route that takes JSON."""

ROUTES_WITHOUT_BODY = {
    ("GET", "/projects"),
    ("GET", "/project"),
    ("GET", "/key"),
    ("GET", "/keys"),
    ("DELETE", "/keys/{key_id}"),
    ("GET", "/sessions"),
    ("DELETE", "/sessions/{session_id}"),
    ("GET", "/policies"),
    ("GET", "/policies/{name}"),
    ("GET", "/policies/{name}/rollout-stage"),
    ("DELETE", "/policies/{name}/rollout-stage"),
    ("GET", "/proposals"),
    ("GET", "/proposals/{proposal_id}"),
    ("POST", "/proposals/{proposal_id}/confirm"),
    ("POST", "/proposals/{proposal_id}/refuse"),
    ("GET", "/precision"),
    ("GET", "/cases"),
    ("GET", "/policies/backtests"),
    ("GET", "/policies/backtests/{backtest_id}"),
    ("GET", "/runs"),
    ("GET", "/runs/{run_id}"),
    ("POST", "/runs/{run_id}/heartbeat"),
    ("GET", "/runs/{run_id}/metrics"),
    ("GET", "/runs/{run_id}/verdicts"),
    ("GET", "/runs/{run_id}/outcomes"),
    ("GET", "/runs/{run_id}/observations"),
    ("GET", "/runs/{run_id}/series"),
    ("GET", "/runs/{run_id}/checkpoints"),
    ("GET", "/runs/{run_id}/eval-requests"),
    ("GET", "/eval-requests"),
    ("GET", "/decisions"),
    ("GET", "/decisions/{decision_id}"),
    ("GET", "/decisions/{decision_id}/outcomes"),
    ("GET", "/endpoints"),
    ("DELETE", "/endpoints/{endpoint_id}"),
    ("POST", "/endpoints/{endpoint_id}/rotate-secret"),
    ("POST", "/endpoints/{endpoint_id}/test"),
    ("GET", "/deliveries"),
    ("GET", "/deliveries/{delivery_id}"),
    ("POST", "/deliveries/{delivery_id}/replay"),
    ("GET", "/audit"),
    ("GET", "/audit/export"),
    ("GET", "/events/schemas"),
    ("POST", "/deliveries/{delivery_id}/retry"),
}
"""Each route without a body."""

OPENMETRICS_ROUTE = ("POST", "/runs/{run_id}/openmetrics")

TEXT_ROUTES = {("POST", "/observations"), OPENMETRICS_ROUTE}
"""Each route that takes text."""

ROUTES = sorted({*BODIES, *ROUTES_WITHOUT_BODY, *TEXT_ROUTES})


@dataclass
class Resources:
    """The ids of one resource of each kind in a project."""

    ids: dict[str, str] = field(default_factory=dict)

    def path(self, template: str) -> str:
        ids = self.ids
        if template.startswith("/pull/"):
            ids = ids | {"endpoint_id": ids.get("pull_endpoint_id", ids["endpoint_id"])}
        if "{request_id}" in template:
            ids = ids | {"run_id": ids.get("suspect_run_id", ids["run_id"])}
        path = template.format(**ids)
        return f"{path}?metric=eval" if template.endswith(("}/observations", "/series")) else path


def create_resources(admin: httpx.Client) -> Resources:
    """Create one resource of each kind by requests."""
    ids = {"name": "paper"}
    ids["endpoint_id"] = expect_json(admin.post("/endpoints", json=ENDPOINT), 201)["id"]
    pull_endpoint = BODIES["POST", "/pull/endpoints"]
    ids["pull_endpoint_id"] = expect_json(admin.post("/pull/endpoints", json=pull_endpoint), 201)["id"]
    ids["project_id"] = expect_json(admin.get("/project"), 200)["id"]
    ids["key_id"] = expect_json(admin.post("/keys", json=BODIES["POST", "/keys"]), 201)["id"]
    sign_in(admin)
    ids["session_id"] = expect_json(admin.get("/sessions"), 200)["items"][0]["id"]
    ids["run_id"] = expect_json(admin.post("/runs", json={"name": "first", "mode": "enforce"}), 201)["id"]
    expect_json(admin.post(f"/runs/{ids['run_id']}/observations", json={"observations": FALLING}), 200)
    ids["decision_id"] = expect_json(admin.get("/decisions"), 200)["items"][0]["id"]
    ids["delivery_id"] = expect_json(admin.get("/deliveries"), 200)["items"][0]["id"]
    backtest = BODIES["POST", "/policies/backtests"]
    ids["backtest_id"] = expect_json(admin.post("/policies/backtests", json=backtest), 202)["id"]
    ids["suspect_run_id"], ids["request_id"] = create_eval_request(admin)
    ids["proposal_id"] = create_proposal(admin)
    return Resources(ids)


def sign_in(client: httpx.Client) -> None:
    """Sign in to the dashboard with the client's key."""
    url = client.base_url.copy_with(path="/login")
    token = re.search(r'name="csrf" value="([^"]+)"', client.get(url).text)
    assert token is not None
    form = {"key": client.headers["Authorization"].removeprefix("Bearer "), "csrf": token[1]}
    assert client.post(url, data=form).status_code == 303


def create_eval_request(admin: httpx.Client) -> tuple[str, str]:
    """The ids of a run whose evals fall until it is suspect, and of its request for a paired evaluation."""
    terms = {"name": "suspect", "policy": "early", "total_steps": 90, "eval_share": 0}
    run_id = expect_json(admin.post("/runs", json=terms), 201)["id"]
    expect_json(admin.post(f"/runs/{run_id}/checkpoints", json={"step": 30, "uri": "file:///30"}), 201)
    for step in range(60):
        value = min(step, 30.0) - 0.3 * max(0, step - 30) + 4.0 * ((step * step * 7) % 11) / 11
        points = [{"metric": "eval", "step": step, "value": value}]
        receipt = expect_json(admin.post(f"/runs/{run_id}/observations", json={"observations": points}), 200)
        if receipt["eval_request"] is not None:
            return run_id, receipt["eval_request"]["id"]
    raise AssertionError("no evaluation was requested")


def create_proposal(admin: httpx.Client) -> str:
    """The id of a stop proposed while the project required a second person; then that setting is reverted."""
    run_id = expect_json(admin.post("/runs", json={"name": "proposed"}), 201)["id"]
    expect_json(admin.patch("/project", json={"second_person": True}), 200)
    proposal_id: str = expect_json(admin.post(f"/runs/{run_id}/stop", json={"reason": "it diverged"}), 202)["id"]
    reverting = expect_json(admin.patch("/project", json={"second_person": False}), 202)["id"]
    second_key = expect_json(admin.post("/keys", json={"name": "second", "scopes": ["admin"]}), 201)["key"]
    expect_json(admin.post(f"/proposals/{reverting}/confirm", headers={"Authorization": f"Bearer {second_key}"}), 200)
    return proposal_id


def call_route(client: httpx.Client, route: tuple[str, str], resources: Resources) -> httpx.Response:
    """Send a valid request to a route."""
    method, template = route
    if route == OPENMETRICS_ROUTE:
        return client.request(method, f"{resources.path(template)}?step=1", content="eval 0.5\n")
    path = resources.path(template) if method == "GET" else resources.path(template).partition("?")[0]
    return client.request(method, path, json=BODIES.get(route))


def expect_json(response: httpx.Response, status: int) -> dict[str, Any]:
    """The response's JSON; fails unless the response has this status."""
    assert response.status_code == status, response.text[:2000]
    document: dict[str, Any] = response.json()
    return document


def expect_problem(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The problem document; fails unless it is well formed and has one of these statuses (none given: any 4xx)."""
    allowed = statuses or range(400, 500)
    assert response.status_code in allowed, (response.status_code, response.text[:2000])
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == response.status_code
    assert document["type"] == f"/problems#{document['code']}"
    assert document["code"] in {kind.code for kind in ProblemKind}
    assert document["instance"] == response.request.url.path
    assert document["title"]
    assert len(document["detail"]) > 10
    for error in document.get("errors", []):
        assert set(error) == {"pointer", "detail"}
        assert error["detail"]
        assert not error["detail"].startswith("Value error")
    return document


def open_run(client: httpx.Client, **terms: Any) -> dict[str, Any]:
    """Open a run with a new name."""
    return expect_json(client.post("/runs", json={"name": uuid.uuid4().hex} | terms), 201)


def list_pages(client: httpx.Client, path: str, **query: Any) -> list[dict[str, Any]]:
    """The items of all pages of a list."""
    items = []
    while True:
        page = expect_json(client.get(path, params=query), 200)
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        query["cursor"] = page["next_cursor"]


def create_decision(client: httpx.Client) -> str:
    """The id of a decision to stop a new run, which has a checkpoint at its best step."""
    path = f"/runs/{open_run(client, mode='enforce')['id']}"
    expect_json(client.post(f"{path}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    expect_json(client.post(f"{path}/observations", json={"observations": FALLING}), 200)
    return str(expect_json(client.get(path), 200)["decision"]["id"])
