"""The index of routes finds what FastAPI would find."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast
from uuid import uuid4

import pytest
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.route_index import RouteIndex
from fastapi import FastAPI
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match
from starlette.types import Message


@pytest.fixture
def app(embedded_database: Database) -> FastAPI:
    return create_app(Settings(), embedded_database, session_secret="s" * 32)


def make_scope(method: str, path: str) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": []}


def list_contexts(app: FastAPI) -> list[RouteContext]:
    """The API routes of an app, in the order in which FastAPI tries them."""
    return [each for each in iter_route_contexts(app.routes) if isinstance(each.original_route, APIRoute)]


def test_index_finds_the_first_route_with_path_and_method(app: FastAPI) -> None:
    """Of all routes that match a request, FastAPI takes the first; so does the index, with the same parameters."""
    index, contexts = app.routes[0], list_contexts(app)
    assert isinstance(index, RouteIndex)
    requests = [
        (method, re.sub(r"{\w+}", "compare", context.path or ""))
        for context in contexts
        for method in context.methods or ()
    ]
    assert len(requests) > 150
    for method, path in requests[:-1]:  # the last route is that of the page for unknown addresses
        scope = make_scope(method, path)
        first = next(context for context in contexts if context.matches(scope)[0] is Match.FULL)
        match, found = index.matches(scope)
        assert (match, found["route"]) == (Match.FULL, first.original_route)
        assert found["path_params"] == first.matches(scope)[1]["path_params"]


SEGMENTS = st.sampled_from(
    ["x", "compare", "search", "backtests", "..", "a\n", "%2F", "\u00e9", str(uuid4())]
) | st.text(max_size=3)
METHODS = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", ""])
ENDS = st.sampled_from(["", "", "/", "//", "\n", "/x", ";a", "/../x"])


def find_answer(app: FastAPI, method: str, path: str) -> tuple[int, object, dict[str, object]]:
    """The status of a request without a key, its endpoint, and the parameters of its path."""
    scope = make_scope(method, path) | {"query_string": b"", "root_path": "", "server": ("x", 80), "scheme": "http"}
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    asyncio.run(cast(Any, app).behind(scope, receive, send))
    return statuses[0], getattr(scope.get("endpoint"), "__qualname__", None), scope.get("path_params", {})


def test_requests_get_the_same_route_without_the_index(embedded_database: Database) -> None:
    """Whatever the method and the path, status, endpoint and parameters are those of FastAPI's own search."""
    indexed, plain = (create_app(Settings(), embedded_database, session_secret="s" * 32) for _ in range(2))
    routes = plain.router.routes
    (mlflow,) = (route for route in routes if getattr(route, "path", None) == "/mlflow")
    for inner in (routes, cast(Any, mlflow).app.router.routes):
        assert isinstance(inner.pop(0), RouteIndex)
    paths = [context.path or "" for context in list_contexts(plain)]
    paths += ["/mlflow/api/2.0/mlflow/runs/search", "/mlflow/api/2.0/mlflow/logged-models/{model_id}"]

    @given(st.sampled_from(paths), st.lists(SEGMENTS, min_size=4, max_size=4), METHODS, ENDS)
    def compare(template: str, segments: list[str], method: str, end: str) -> None:
        filling = iter(segments)
        path = re.sub(r"{[^}]+}", lambda _: next(filling), template) + end
        assert find_answer(indexed, method, path) == find_answer(plain, method, path)

    compare()


@pytest.mark.parametrize(("method", "path"), [("GET", "/api/v1/nothing"), ("PUT", "/livez"), ("OPTIONS", "/livez")])
def test_index_leaves_other_requests_to_the_routes(app: FastAPI, method: str, path: str) -> None:
    """A path that no API route has, and a method that it does not have, are refused as before."""
    assert app.routes[0].matches(make_scope(method, path)) == (Match.NONE, {})
