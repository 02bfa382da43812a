"""A page for whoever came by a browser to where nothing is; programs are answered in their own words."""

from __future__ import annotations

from fastapi import APIRouter, Response
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from evalstop_service.web.dashboard.responses import PageRoute, page

PROGRAMS = ("/api/", "/mlflow/")


class _Browsed(PageRoute):
    """A route that only takes what a browser asks for."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        browsed = scope["type"] == "http" and "text/html" in Headers(scope=scope).get("accept", "")
        if not browsed or scope["path"].startswith(PROGRAMS):
            return Match.NONE, {}
        return super().matches(scope)


router = APIRouter(route_class=_Browsed)


@router.get("/{path:path}")
def show_nothing() -> Response:
    """That there is no such page."""
    detail = "There is no page at this address. It may have been cut when it was copied."
    return page("error.html", 404, visitor=None, title="Not found", detail=detail)
