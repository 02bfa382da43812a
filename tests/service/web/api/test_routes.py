"""The tables of routes, health checks, and unknown paths, methods and ids."""

from __future__ import annotations

import ast
import uuid
from pathlib import Path

import evalstop_service
import httpx
import pytest
from evalstop_service.web.problems import ProblemKind

from tests.service.web.api.api_calls import Resources, call_route, expect_problem
from tests.service.web.api.conftest import Service
from tests.service.web.api.routes import INSTALLATION_ROUTES, ROUTES
from tests.service.web.api.test_unusual_values import ON_POSTGRESQL


def test_health_checks_need_no_key(service: Service) -> None:
    """/livez and /readyz answer without a key."""
    for path in ("livez", "readyz"):
        assert httpx.get(f"{service.url}/{path}", trust_env=False, timeout=60).json() == {"status": "ok"}


def test_unknown_path_and_method_are_problems(admin: httpx.Client) -> None:
    """The 404 points to the documentation, and the 405 names the allowed methods."""
    assert "/docs" in expect_problem(admin.get("/nosuch"), 404)["detail"]
    response = admin.put("/runs", json={})
    assert "GET" in expect_problem(response, 405)["detail"]
    assert response.headers["allow"] == "GET, HEAD, POST"
    assert admin.delete("/project/pause").headers["allow"] == "POST"


@ON_POSTGRESQL
@pytest.mark.parametrize(
    "route",
    [
        route
        for route in ROUTES
        if "{" in route[1] and route not in INSTALLATION_ROUTES and route != ("POST", "/groups/{name}")
    ],
    ids=" ".join,
)
def test_unknown_id_is_404_and_malformed_id_is_422(admin: httpx.Client, route: tuple[str, str]) -> None:
    """Each route with an id in its path refuses ids of nothing and ids that are no UUID."""
    if "{name}" in route[1] or "{event_type}" in route[1]:
        expect_problem(call_route(admin, route, Resources({"name": "nosuch", "event_type": "nosuch"})), 404)
        return
    ids = (
        *("run_id", "key_id", "decision_id", "endpoint_id", "delivery_id"),
        *("request_id", "session_id", "proposal_id", "note_id"),
    )
    expect_problem(call_route(admin, route, Resources(dict.fromkeys(ids, str(uuid.uuid4())))), 404)
    errors = expect_problem(call_route(admin, route, Resources(dict.fromkeys(ids, "nonsense"))), 422)["errors"]
    assert "_id" in errors[0]["pointer"]


def test_every_problem_kind_is_used() -> None:
    """The documentation lists no code that no response has."""
    used_kinds = {
        node.attr
        for path in Path(evalstop_service.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ProblemKind"
    }
    assert used_kinds == {kind.name for kind in ProblemKind}
    assert len({kind.title for kind in ProblemKind}) == len(ProblemKind)
