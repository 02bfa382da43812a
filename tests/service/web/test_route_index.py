"""The index of routes finds what FastAPI would find."""

from __future__ import annotations

import re
from typing import Any

import pytest
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.route_index import RouteIndex
from fastapi import FastAPI
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from starlette.routing import Match


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


@pytest.mark.parametrize(("method", "path"), [("GET", "/api/v1/nothing"), ("PUT", "/livez"), ("OPTIONS", "/livez")])
def test_index_leaves_other_requests_to_the_routes(app: FastAPI, method: str, path: str) -> None:
    """A path that no API route has, and a method that it does not have, are refused as before."""
    assert app.routes[0].matches(make_scope(method, path)) == (Match.NONE, {})
