"""Adds the pages to the app, and for browsers the 404 page; API and MLflow clients get errors in their own formats."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter, FastAPI, Response
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from evalstop_service.clock import Clock, utc_now
from evalstop_service.security.openid import OpenIdProvider
from evalstop_service.web.context import Context
from evalstop_service.web.pages import (
    compare,
    fleet,
    group,
    labeling,
    message_links,
    overview,
    policies,
    precision,
    run_list,
    run_page,
    settings,
    sign_in,
    static_files,
    webhooks,
)
from evalstop_service.web.pages.cookies import Sessions
from evalstop_service.web.pages.responses import PageRoute, render_page
from evalstop_service.web.pages.run_page import analysis, run_actions
from evalstop_service.web.pages.visitor import Site
from evalstop_service.web.problems import PATH, ProblemKind

PAGES = (
    *(static_files, message_links, sign_in, overview, precision, labeling, run_list, fleet, group),
    compare,  # before the page of a run, which would match its address as a run's id
    *(run_page, analysis, run_actions),
    *(policies, webhooks, settings),
)

API_PREFIXES = ("/api/", "/mlflow/")


class _BrowserRoute(PageRoute):
    """A route that matches requests for HTML only."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        wants_html = scope["type"] == "http" and "text/html" in Headers(scope=scope).get("accept", "")
        if not wants_html or scope["path"].startswith(API_PREFIXES):
            return Match.NONE, {}
        return super().matches(scope)


_problems = APIRouter(route_class=PageRoute)
_not_found = APIRouter(route_class=_BrowserRoute)


@_problems.get(PATH)
def show_problem_kinds() -> Response:
    """What each code of a problem means, and what to do about it."""
    return render_page("problems.html", visitor=None, kinds=ProblemKind)


@_not_found.get("/{path:path}")
def show_not_found() -> Response:
    """Answer that there is no such page."""
    detail = "There is no page at this address. Was the link cut off when it was copied?"
    return render_page("error.html", 404, visitor=None, title="Not found", detail=detail)


def install(app: FastAPI, context: Context, session_secret: str, openid: OpenIdProvider | None = None) -> None:
    """Add the pages to an app. Replicas of one service need the same `session_secret`."""
    app.state.pages = Site(context, Sessions(session_secret, context.clock), openid)
    static_files.install(app)
    app.router.routes.extend(route for page in PAGES for route in page.router.routes)
    app.router.routes.extend([*_problems.routes, *_not_found.routes])  # last, because it matches any path


def sign_in_token(session_secret: str, key_id: UUID, clock: Clock = utc_now) -> str:
    """The token of a link `/login?token=...`, which is valid for twelve hours after its creation."""
    return Sessions(session_secret, clock).sign_link(key_id)
