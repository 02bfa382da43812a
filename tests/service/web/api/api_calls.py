"""Requests of the API's tests, and checks of the answers by the OpenAPI document."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.problems import ProblemKind

from tests.service.web.api.routes import BODIES, ENDPOINT

FALLING = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate([0.5, 0.9, 0.8, 0.7, 0.6])]
"""Three declines: the policy `paper` stops at step 4."""


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
        return f"{path}?metric=eval" if template.endswith("}/observations") else path


def create_resources(admin: httpx.Client) -> Resources:
    """Create one resource of each kind by requests."""
    ids = {"name": "paper"}
    ids["endpoint_id"] = expect_json(admin.post("/endpoints", json=ENDPOINT), 201)["id"]
    pull_endpoint = BODIES["POST", "/pull/endpoints"]
    ids["pull_endpoint_id"] = expect_json(admin.post("/pull/endpoints", json=pull_endpoint), 201)["id"]
    ids["project_id"] = expect_json(admin.get("/project"), 200)["id"]
    ids["key_id"] = expect_json(admin.post("/keys", json=BODIES["POST", "/keys"]), 201)["id"]
    sign_in(admin)
    ids["run_id"] = expect_json(admin.post("/runs", json={"name": "first", "mode": "enforce"}), 201)["id"]
    expect_json(admin.post(f"/runs/{ids['run_id']}/observations", json={"observations": FALLING}), 200)
    noted = admin.post(f"/runs/{ids['run_id']}/notes", json={"step": 1, "text": "a new grader"})
    ids["note_id"] = expect_json(noted, 200)["step_notes"][0]["id"]
    ids["decision_id"] = expect_json(admin.get("/decisions"), 200)["items"][0]["id"]
    ids["delivery_id"] = expect_json(admin.get("/deliveries"), 200)["items"][0]["id"]
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
    path = resources.path(template) if method == "GET" else resources.path(template).partition("?")[0]
    return client.request(method, path, json=BODIES.get(route))


def expect_json(response: httpx.Response, status: int) -> dict[str, Any]:
    """The response's JSON; fails unless the response has this status and is as the OpenAPI document says."""
    assert response.status_code == status, response.text[:2000]
    check_answer(response)
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


@cache
def load_document() -> dict[str, Any]:
    """The OpenAPI document."""
    return create_app(Settings(), Database("sqlite:///unused.db"), session_secret="none").openapi()


def check_answer(response: httpx.Response) -> None:
    """Fail unless the document has the status of the answer for its operation, and its content is valid by it."""
    found = find_operation(response.request.method.lower(), response.request.url.path)
    if found is None:
        return
    validators = load_validators(*found)
    assert response.status_code in validators, (found, response.status_code)
    media_type = response.headers.get("content-type", "").partition(";")[0]
    validator = validators[response.status_code].get(media_type)
    assert validator is not None, (found, media_type)
    errors = [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(response.json())]
    assert errors == [], (found, errors[:3])


def find_operation(method: str, path: str) -> tuple[str, str] | None:
    """The path template and the method of an operation, or None for an address outside of the API."""
    for pattern, template in list_patterns():
        if pattern.fullmatch(path) and method in load_document()["paths"][template]:
            return template, method
    return None


@cache
def list_patterns() -> list[tuple[re.Pattern[str], str]]:
    """Each path of the document as a pattern; those without parameters come first."""
    templates = sorted(load_document()["paths"], key=lambda template: template.count("{"))
    return [(re.compile(re.sub(r"\{\w+\}", "[^/]+", template)), template) for template in templates]


@cache
def load_validators(template: str, method: str) -> dict[int, dict[str, Any]]:
    """The validators of an operation's successful answers, by status and media type."""
    document = load_document()
    answers = document["paths"][template][method]["responses"]
    return {
        int(status): {
            media_type: jsonschema_rs.validator_for(
                {**content["schema"], "components": document["components"]}, validate_formats=True
            )
            for media_type, content in answer.get("content", {}).items()
            if "schema" in content
        }
        for status, answer in answers.items()
        if status.isdecimal()
    }
