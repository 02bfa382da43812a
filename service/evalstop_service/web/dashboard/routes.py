"""Joins the pages to an app: what they share, and their routes."""

from __future__ import annotations

from uuid import UUID

from fastapi import FastAPI

from evalstop_service.clock import Clock, utc_now
from evalstop_service.store.database import Database
from evalstop_service.web.dashboard import (
    backtests,
    figures,
    not_found,
    overview,
    policies,
    roles,
    run,
    run_actions,
    run_analysis,
    run_data,
    runs,
    settings,
    sign_in,
    static_files,
    webhooks,
)
from evalstop_service.web.dashboard import openid_sign_in as openid_pages
from evalstop_service.web.dashboard.doors import Doors
from evalstop_service.web.dashboard.responses import TEMPLATES
from evalstop_service.web.dashboard.server_sent_events import Streams
from evalstop_service.web.dashboard.sessions import Sessions
from evalstop_service.web.dashboard.visitor import OpenId, Site

PARTS = (
    *(static_files, sign_in, openid_pages, overview, figures, runs, run, run_analysis, run_data, run_actions, roles),
    *(backtests, policies, webhooks, settings),
    not_found,
)
"""The modules with the routes, in the order in which they are asked."""


def install(
    app: FastAPI, database: Database, clock: Clock, session_secret: str, doors: Doors, openid: OpenId | None = None
) -> None:
    """Add the pages to an app. Replicas of one service need the same `session_secret`."""
    app.state.pages = Site(database, clock, Sessions(session_secret, clock), TEMPLATES, Streams(), doors, openid)
    for part in PARTS:
        app.include_router(part.router, include_in_schema=False)


def sign_in_token(session_secret: str, key_id: UUID, clock: Clock = utc_now) -> str:
    """The token of a link `/login?token=...` that signs in whoever opens it within twelve hours."""
    return Sessions(session_secret, clock).link(key_id)
