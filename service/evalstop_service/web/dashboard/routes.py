"""Adds the pages to the app."""

from __future__ import annotations

from functools import cache
from uuid import UUID

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute

from evalstop_service.clock import Clock, utc_now
from evalstop_service.web.context import Context
from evalstop_service.web.dashboard import (
    analysis,
    backtests,
    compare,
    documentation,
    fleet,
    labeling,
    message_links,
    metric_charts,
    not_found,
    observations,
    openid_sign_in,
    overview,
    policies,
    policy_editor,
    policy_ladder,
    precision,
    proposals,
    run_actions,
    run_list,
    run_page,
    settings,
    sign_in,
    static_files,
    webhooks,
    what_if,
)
from evalstop_service.web.dashboard.server_sent_events import Streams
from evalstop_service.web.dashboard.sessions import Sessions
from evalstop_service.web.dashboard.visitor import OpenId, Site

PAGES = (
    *(static_files, message_links, sign_in, openid_sign_in, overview, precision, labeling, run_list, fleet),
    compare,  # before the page of a run, which would match its address as a run's id
    *(run_page, what_if, metric_charts, analysis, observations, run_actions),
    *(backtests, policies, policy_editor, policy_ladder, proposals, webhooks, settings),
    not_found,  # last, because it matches any path
)


def install(app: FastAPI, context: Context, session_secret: str, openid: OpenId | None = None) -> None:
    """Add the pages to an app. Replicas of one service need the same `session_secret`."""
    app.state.pages = Site(context, Sessions(session_secret, context.clock), Streams(context.limits), openid)
    documentation.install(app)
    app.router.routes.extend(_build_routes())


@cache
def _build_routes() -> list[BaseRoute]:
    """The routes of all pages, built once per process, because that takes FastAPI long."""
    router = APIRouter(include_in_schema=False)
    for page in PAGES:
        router.include_router(page.router)
    return router.routes


def sign_in_token(session_secret: str, key_id: UUID, clock: Clock = utc_now) -> str:
    """The token of a link `/login?token=...`, which is valid for twelve hours after its creation."""
    return Sessions(session_secret, clock).sign_link(key_id)
