"""Who looks at a page, and what the pages share: handed to routes as dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from jinja2 import Environment

from evalstop_service.clock import Clock
from evalstop_service.pages.answers import SignInNeeded
from evalstop_service.pages.live import Streams
from evalstop_service.pages.sessions import COOKIE, Sessions
from evalstop_service.store import keys, projects
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.keys import Key
from evalstop_service.store.projects import Project


@dataclass(frozen=True)
class Site:
    """What the pages share."""

    database: Database
    clock: Clock
    sessions: Sessions
    templates: Environment
    streams: Streams


@dataclass(frozen=True)
class Visitor:
    """A person behind a key that may read, in its project."""

    key: Key
    project: Project


def _site(request: Request) -> Site:
    site: Site = request.app.state.pages
    return site


SiteOf = Annotated[Site, Depends(_site)]


def may_look(key: Key | None) -> bool:
    """Whether a key opens the pages: it is in use, bound to a project, and may read."""
    return key is not None and key.project_id is not None and bool({"read", "admin"} & set(key.scopes))


def known(tx: Transaction, site: Site, request: Request) -> Visitor | None:
    """The visitor that a request's cookie names, if their key still opens the pages."""
    key_id = site.sessions.of_session(request.cookies.get(COOKIE, ""))
    key = keys.find(tx, key_id) if key_id else None
    if key is None or key.project_id is None or not may_look(key):
        return None
    return Visitor(key, projects.get(tx, key.project_id))


def _visitor(request: Request, site: SiteOf) -> Visitor:
    with site.database.reading() as tx:
        visitor = known(tx, site, request)
    if visitor is None:
        raise SignInNeeded
    return visitor


SignedIn = Annotated[Visitor, Depends(_visitor)]
