"""What of a request leaves the event loop: each change of threads is a wait in a busy process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.api.health import check_liveness
from evalstop_service.web.api.json_body import JsonRoute
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts


@pytest.fixture
def routes(embedded_database: Database) -> list[APIRoute]:
    app = create_app(Settings(), embedded_database, session_secret="s" * 32)
    listed = [context.original_route for context in iter_route_contexts(app.routes)]
    return [route for route in listed if isinstance(route, APIRoute)]


def list_dependencies(dependant: Dependant) -> Iterator[Dependant]:
    """All dependencies, those of dependencies included."""
    for inner in dependant.dependencies:
        yield inner
        yield from list_dependencies(inner)


def test_no_dependency_takes_a_thread(routes: list[APIRoute]) -> None:
    """FastAPI would run it in a thread that all requests share; what needs one takes it from its lane."""
    calls = {dependency.call for route in routes for dependency in list_dependencies(route.dependant)}
    functions = [call for call in calls if inspect.isfunction(call)]
    in_threads = [
        call.__name__
        for call in functions
        if not inspect.iscoroutinefunction(call) and not inspect.isasyncgenfunction(call)
    ]
    assert len(functions) > 10
    assert in_threads == []


def test_liveness_probe_takes_no_thread(routes: list[APIRoute]) -> None:
    """The process is alive even when all its threads are busy."""
    assert check_liveness in [route.endpoint for route in routes]
    assert inspect.iscoroutinefunction(check_liveness)


def test_response_is_checked_in_the_thread_of_the_event_loop(routes: list[APIRoute]) -> None:
    """To FastAPI the routes of the API are coroutines; for a function it checks the response in another thread."""
    json_routes = [route for route in routes if isinstance(route, JsonRoute)]
    assert len(json_routes) > 50
    assert all(inspect.iscoroutinefunction(route.endpoint) for route in json_routes)
