"""Finds the route of a request at once: FastAPI tries one after the other, which takes longer than most routes do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send


class RouteIndex(BaseRoute):
    """The first route of an app: stands for the API routes among the others, with one regular expression per method.

    Requests that match none of them, and routes that look at more than path and method, are left to the others.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        by_method: dict[str, list[APIRoute]] = {}
        for route in routes:
            if isinstance(route, APIRoute) and type(route).matches is APIRoute.matches:
                for method in route.methods or ():
                    by_method.setdefault(method, []).append(route)
        self._by_method = {method: (_join_paths(found), found) for method, found in by_method.items()}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """The match of the first route with the request's path and method."""
        paths, routes = self._by_method.get(scope.get("method", ""), (None, ()))
        found = paths and paths.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
        if not found:
            return Match.NONE, {}
        return routes[(found.lastindex or 0) - 1].matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the route that matched answer."""
        await scope["route"].app(scope, receive, send)


def _join_paths(routes: Sequence[APIRoute]) -> re.Pattern[str]:
    """One pattern whose groups are the paths of the routes."""
    paths = (route.path_regex.pattern.removeprefix("^").removesuffix("$") for route in routes)
    return re.compile("|".join(f"({re.sub(r'[(][?]P<[^>]+>', '(?:', path)})" for path in paths))
