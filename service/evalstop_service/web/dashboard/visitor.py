"""Who looks at a page, and what the pages share: handed to routes as dependencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Request
from jinja2 import Environment

from evalstop_service.clock import Clock
from evalstop_service.errors import NotFound
from evalstop_service.security.openid import Provider
from evalstop_service.security.scopes import EVERY, Grants, VisitorRole, of_scopes, role_in
from evalstop_service.store import keys, projects, runs, sessions
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.keys import Key
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run
from evalstop_service.store.sessions import Session
from evalstop_service.web.dashboard.cookies import PROJECT, SESSION
from evalstop_service.web.dashboard.doors import Doors
from evalstop_service.web.dashboard.responses import MayNot, SignInNeeded, StrangeForm
from evalstop_service.web.dashboard.server_sent_events import Streams
from evalstop_service.web.dashboard.sessions import Sessions


@dataclass(frozen=True)
class OpenId:
    """Who is asked who a visitor is, and what that lets them be."""

    provider: Provider
    grants: Grants


@dataclass(frozen=True)
class Site:
    """What the pages share."""

    database: Database
    clock: Clock
    sessions: Sessions
    templates: Environment
    streams: Streams
    doors: Doors
    openid: OpenId | None = None


@dataclass(frozen=True)
class Visitor:
    """Who looks at a project, and what they may do in it.

    `actor`: as what they do is written down. `csrf`: the token that each of their forms carries. `session`: of those
    who signed in by an OpenID provider.
    """

    project: Project
    role: VisitorRole
    actor: str
    csrf: str
    session: Session | None = None

    @property
    def may_leave(self) -> bool:
        """Whether they may go to another project."""
        return self.session is not None and (len(self.session.grants) > 1 or EVERY in self.session.grants)

    def run(self, tx: Transaction, run_id: UUID) -> Run:
        """A run of the project that they look at; raises NotFound."""
        found = runs.find_run(tx, self.project.id, run_id)
        if found is None:
            raise NotFound
        return found

    def may(self, role: str) -> bool:
        """Whether they may do what this role may; for templates, which do not show what would be refused."""
        return self.role.covers(VisitorRole(role))


def _site(request: Request) -> Site:
    site: Site = request.app.state.pages
    return site


SiteOf = Annotated[Site, Depends(_site)]

FORM_TOKEN = "csrf"  # noqa: S105 - the name of a field
HEADER_TOKEN = "X-CSRF-Token"  # noqa: S105 - the name of a header
_SAFE = ("GET", "HEAD")


def may_look(key: Key | None) -> bool:
    """Whether a key opens the pages: it is in use, bound to a project, and may read."""
    return key is not None and key.project_id is not None and of_scopes(key.scopes) is not None


def known(tx: Transaction, site: Site, request: Request) -> Visitor | None:
    """The visitor that a request's cookie names, if their key or their session still opens the pages."""
    cookie = request.cookies.get(SESSION, "")
    form = site.sessions.form(cookie)
    if cookie.startswith(sessions.PREFIX):
        session = sessions.find_session(tx, cookie, site.clock())
        project = _entered(tx, session, request.cookies.get(PROJECT, "")) if session else None
        role = role_in(session.grants, project.name) if session and project else None
        if session is None or project is None or role is None:
            return None
        return Visitor(project, role, user(session), form, session)
    key_id = site.sessions.of_session(cookie)
    key = keys.find_key(tx, key_id) if key_id else None
    role = of_scopes(key.scopes) if key else None
    if key is None or key.project_id is None or role is None:
        return None
    return Visitor(projects.get_project(tx, key.project_id), role, f"key {key.name}", form)


def user(session: Session) -> str:
    """How somebody who signed in by a provider is written down."""
    return f"user {session.name}"


def granted(tx: Transaction, grants: Mapping[str, str]) -> list[Project]:
    """The projects that these grants open and that there are, by name."""
    if EVERY in grants:
        return projects.list_projects(tx)
    return [found for name in sorted(grants) if (found := projects.find_project_by_name(tx, name)) is not None]


def _entered(tx: Transaction, session: Session, chosen: str) -> Project | None:
    """The project that the visitor chose, if it is open to them, else the first that is."""
    try:
        project = projects.find_project(tx, UUID(chosen))
    except ValueError:
        project = None
    if project is not None and role_in(session.grants, project.name) is not None:
        return project
    return next(iter(granted(tx, session.grants)), None)


def foreign(request: Request) -> bool:
    """Whether the browser says that another site had it send this."""
    return request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


async def form_token(request: Request) -> str:
    """The token that came with a form, or beside what a script sends."""
    if HEADER_TOKEN in request.headers:
        return request.headers[HEADER_TOKEN]
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return ""
    return str((await request.form()).get(FORM_TOKEN, ""))


def _visitor(request: Request, site: SiteOf) -> Visitor:
    with site.database.reading() as tx:
        visitor = known(tx, site, request)
    if visitor is None:
        raise SignInNeeded
    return visitor


async def _signed_in(request: Request, site: SiteOf, visitor: Annotated[Visitor, Depends(_visitor)]) -> Visitor:
    if request.method not in _SAFE:
        token = await form_token(request)
        if foreign(request) or not site.sessions.is_form(request.cookies.get(SESSION, ""), token):
            raise StrangeForm
    return visitor


SignedIn = Annotated[Visitor, Depends(_signed_in)]
"""Any visitor. Whatever is not read-only needs the token of a form of theirs: so it is with the two below."""


def _at_least(role: VisitorRole) -> Callable[[Visitor], Visitor]:
    def visitor_of_role(visitor: SignedIn) -> Visitor:
        if not visitor.role.covers(role):
            raise MayNot(f"You are signed in as {visitor.role}; this takes {_article(role)}.")
        return visitor

    return visitor_of_role


def _article(role: VisitorRole) -> str:
    return f"an {role}" if role[0] in "ao" else f"a {role}"


Operating = Annotated[Visitor, Depends(_at_least(VisitorRole.OPERATOR))]
"""A visitor who may veto, release, undo, label and pause."""

Administering = Annotated[Visitor, Depends(_at_least(VisitorRole.ADMIN))]
"""A visitor who may change what the project is."""
