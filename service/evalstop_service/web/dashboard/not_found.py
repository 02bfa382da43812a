"""The 404 page for browsers; API and MLflow clients get errors in their own formats."""

from __future__ import annotations

from fastapi import APIRouter, Response
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from evalstop_service.web.dashboard.responses import PageRoute, render_page

API_PREFIXES = ("/api/", "/mlflow/")


class _BrowserRoute(PageRoute):
    """A route that matches requests for HTML only."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        wants_html = scope["type"] == "http" and "text/html" in Headers(scope=scope).get("accept", "")
        if not wants_html or scope["path"].startswith(API_PREFIXES):
            return Match.NONE, {}
        return super().matches(scope)


router = APIRouter(route_class=_BrowserRoute)


@router.get("/{path:path}")
def show_not_found() -> Response:
    """Answer that there is no such page."""
    detail = "There is no page at this address. Was the link cut off when it was copied?"
    return render_page("error.html", 404, visitor=None, title="Not found", detail=detail)
