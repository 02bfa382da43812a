"""Joins the pages to an app: what they share, and their routes."""

from __future__ import annotations

from uuid import UUID

from fastapi import FastAPI

from evalstop_service.clock import Clock, utc_now
from evalstop_service.pages import (
    acting,
    analysis,
    assets,
    nowhere,
    numbers,
    overview,
    policies,
    precision,
    rehearsals,
    roles,
    run,
    runs,
    settings,
    signing_in,
    webhooks,
)
from evalstop_service.pages import openid as openid_pages
from evalstop_service.pages.answers import TEMPLATES
from evalstop_service.pages.doors import Doors
from evalstop_service.pages.live import Streams
from evalstop_service.pages.sessions import Sessions
from evalstop_service.pages.visitor import OpenId, Site
from evalstop_service.store.database import Database

PARTS = (
    *(assets, signing_in, openid_pages, overview, precision, runs, run, analysis, numbers, acting, roles),
    *(rehearsals, policies, webhooks, settings),
    nowhere,
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
