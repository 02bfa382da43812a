"""Dependencies of page routes: the signed-in visitor, and what all pages share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated
from uuid import UUID

from anyio import to_thread
from fastapi import Depends, Request

from evalstop_service.clock import Clock
from evalstop_service.projects.key_cache import may_come_from
from evalstop_service.security.openid import OpenIdProvider
from evalstop_service.security.scopes import EVERY, VisitorRole, find_role, role_of_scopes
from evalstop_service.store import keys, projects, runs
from evalstop_service.store.audit import Author
from evalstop_service.store.database import WORK, Database, Transaction
from evalstop_service.store.keys import Key, Session
from evalstop_service.store.projects import Project
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.runs import Run
from evalstop_service.web.context import Context, read_address
from evalstop_service.web.limits import LIMITS, hold_place, set_sender
from evalstop_service.web.pages.cookies import FRESH_SECONDS, PROJECT, SESSION, Sessions, read_cookie
from evalstop_service.web.pages.responses import (
    Forbidden,
    SignInOutdated,
    SignInRequired,
)

SEEN_REVISION = "x-seen-revision"
"""The header of an open page that asks every two seconds whether it has changed; 204 says that it has not."""


@dataclass(frozen=True)
class Site:
    """State shared by all pages."""

    context: Context
    sessions: Sessions
    openid: OpenIdProvider | None = None

    @property
    def database(self) -> Database:
        """The database of the context."""
        return self.context.database

    @property
    def clock(self) -> Clock:
        """The clock of the context."""
        return self.context.clock


@dataclass(frozen=True)
class Visitor:
    """A signed-in person, with their role in the selected project.

    `actor` is their name in the audit log, `csrf` the token of their forms. `seen`: the revision of the page that their
    browser shows, if it asks whether there is a newer one.
    """

    project: Project
    role: VisitorRole
    actor: str
    csrf: str
    session: Session
    seen: str = ""

    @property
    def can_switch_project(self) -> bool:
        """Whether they may switch to another project."""
        return len(self.session.grants) > 1 or EVERY in self.session.grants

    def has_just_signed_in(self, now: datetime) -> bool:
        """Whether their sign-in is recent."""
        return (now - self.session.created_at).total_seconds() <= FRESH_SECONDS

    def load_run(self, tx: Transaction, run_id: UUID) -> Run:
        """A run of their project; raises NotFound."""
        return runs.load_run(tx, self.project.id, run_id)

    @property
    def may_correct_roles(self) -> bool:
        """Whether they may change metric roles, which can change the verdict."""
        return self.role.covers(VisitorRole.ADMIN if self.project.second_person else VisitorRole.OPERATOR)

    @property
    def identity(self) -> str:
        """Their unique identity: the subject at the provider, or the key."""
        session = self.session
        return f"user {session.issuer} {session.subject}" if session.key_id is None else f"key {session.key_id}"

    def has_spoken_for(self, proposal: Proposal) -> bool:
        """Whether they proposed or approved it."""
        return any(approval.identity == self.identity for approval in proposal.approvals)

    def author(self, now: datetime) -> Author:
        """The author of a change that is made now."""
        return Author(self.project.id, self.actor, now, self.identity)

    def may(self, role: str) -> bool:
        """Whether their role covers this one; templates hide actions that would be refused."""
        return self.role.covers(VisitorRole(role))


async def _site(request: Request) -> Site:
    site: Site = request.app.state.pages
    return site


SiteOf = Annotated[Site, Depends(_site)]


def may_view(key: Key | None) -> bool:
    """Whether a key may sign in: it is active, bound to a project, and has the scope read."""
    return key is not None and key.project_id is not None and role_of_scopes(key.scopes) is not None


def find_visitor(tx: Transaction, site: Site, request: Request) -> Visitor | None:
    """The visitor of a request's cookie, if their key or session is still valid."""
    cookie = read_cookie(request, SESSION)
    session = keys.find_session(tx, cookie, site.clock()) if cookie.startswith(keys.SESSION_PREFIX) else None
    if session is None:
        return None
    form_token = site.sessions.form_token(cookie)
    if session.key_id is not None:
        key = keys.find_key(tx, session.key_id, site.clock())
        if key is None or key.project_id is None or not may_come_from(key, read_address(request)):
            return None
        if (role := role_of_scopes(key.scopes)) is None:
            return None
        return Visitor(projects.get_project(tx, key.project_id), role, f"key {key.name}", form_token, session)
    project = _find_project(tx, session, read_cookie(request, PROJECT))
    role = find_role(session.grants, project.name) if project else None
    return Visitor(project, role, name_user(session), form_token, session) if project and role else None


def name_user(session: Session) -> str:
    """The name in the audit log of a person who signed in with OpenID."""
    return f"user {session.name}"


def load_granted_projects(tx: Transaction, grants: Mapping[str, str]) -> list[Project]:
    """The existing projects that these grants give a role in, by name."""
    if EVERY in grants:
        return projects.list_projects(tx)
    return [project for name in sorted(grants) if (project := projects.find_project_by_name(tx, name)) is not None]


def _find_project(tx: Transaction, session: Session, chosen: str) -> Project | None:
    """The project that the visitor selected, if they have a role in it, else the first one in which they do."""
    try:
        project = projects.find_project(tx, UUID(chosen))
    except ValueError:
        project = None
    if project is not None and find_role(session.grants, project.name) is not None:
        return project
    return next(iter(load_granted_projects(tx, session.grants)), None)


def is_cross_site(request: Request) -> bool:
    """Whether the browser reports that another site caused the request."""
    return request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


async def identify_visitor(request: Request, site: Site) -> Visitor | None:
    """The visitor of a request, found in a thread."""

    def find() -> Visitor | None:
        with site.database.reading() as tx:
            return find_visitor(tx, site, request)

    return await to_thread.run_sync(find, limiter=LIMITS.get().authentication)


async def _require_visitor(request: Request, site: SiteOf) -> Visitor:
    visitor = await identify_visitor(request, site)
    if visitor is None:
        raise SignInRequired
    set_sender(visitor.identity, visitor.project.id)
    if not WORK.get().is_decision:
        hold_place(LIMITS.get().requests)
    if request.method not in ("GET", "HEAD"):
        is_form = request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
        token = str((await request.form()).get("csrf", "")) if is_form else ""
        if is_cross_site(request) or not site.sessions.verify_form_token(read_cookie(request, SESSION), token):
            raise Forbidden("The form does not belong to this session. Reload the page and submit the form again.")
    return replace(visitor, seen=request.headers.get(SEEN_REVISION, ""))


SignedIn = Annotated[Visitor, Depends(_require_visitor)]
"""Any visitor. Requests that change anything need their form token, here and for the two roles below."""


def _require_role(role: VisitorRole) -> Callable[[Visitor], Awaitable[Visitor]]:
    async def require_role(visitor: SignedIn) -> Visitor:
        if not visitor.role.covers(role):
            raise Forbidden(f"You are signed in as {visitor.role}. This needs the role {role}.")
        return visitor

    return require_role


Operator = Annotated[Visitor, Depends(_require_role(VisitorRole.OPERATOR))]
"""A visitor with the role operator: veto, release, undo, label, pause."""

Admin = Annotated[Visitor, Depends(_require_role(VisitorRole.ADMIN))]
"""A visitor with the role admin: settings, keys, endpoints."""


async def _require_fresh_sign_in(request: Request, site: SiteOf, visitor: Admin) -> Visitor:
    if not visitor.has_just_signed_in(site.clock()):
        raise SignInOutdated(request.url.path)
    return visitor


FreshAdmin = Annotated[Visitor, Depends(_require_fresh_sign_in)]
"""An admin with a recent sign-in: for changes that allow more stops or grant access, and for showing secrets."""
