"""Dependencies of page routes: the signed-in visitor, what all pages share, and the events that notify open pages of
changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated
from uuid import UUID

import anyio
import anyio.to_thread
import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Header, Request, Response
from fastapi.responses import PlainTextResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from evalstop_service.clock import Clock
from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.projects.key_cache import may_come_from
from evalstop_service.security.openid import OpenIdProvider
from evalstop_service.security.scopes import EVERY, Grants, VisitorRole, find_role, role_of_scopes
from evalstop_service.store import keys, projects, runs
from evalstop_service.store.audit import Author
from evalstop_service.store.database import WORK, Database, Transaction, Work
from evalstop_service.store.faults import Fault, find_fault
from evalstop_service.store.keys import Key, Session
from evalstop_service.store.projects import Project
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.runs import Run
from evalstop_service.web.context import Context, read_address
from evalstop_service.web.limits import LIMITS, Limits, hold_place, set_sender
from evalstop_service.web.pages.cookies import FRESH_SECONDS, PROJECT, SESSION, Sessions, read_cookie, read_notice
from evalstop_service.web.pages.responses import (
    ALL_TIME,
    Forbidden,
    InvalidFormToken,
    Period,
    SignInOutdated,
    SignInRequired,
    read_period,
)

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15
SEND_TIMEOUT_SECONDS = 30
_POLLING_THREADS = 4  # separate from those of the API, so that open pages cannot starve it

ReadRevision = Callable[[], str | None]
"""Reads the current revision of a page; None if the visitor may no longer see it."""


class Streams:
    """The open streams of a process."""

    def __init__(self, limits: Limits, poll_seconds: float = POLL_SECONDS) -> None:
        self._places = limits.event_streams
        self._poll_seconds = poll_seconds
        self._polls = CapacityLimiter(_POLLING_THREADS)
        self.open_count = 0

    def open_stream(self, sender: Work, seen_revision: str, read_revision: ReadRevision) -> Response:
        """A stream of `changed` events after `seen_revision`, for a sender; 429 when too many are open."""
        if not self._places.has_room(sender):
            return PlainTextResponse("too many open pages of one person or project", 429, {"Retry-After": "30"})
        return EventSourceResponse(
            self._send_events(sender, seen_revision, read_revision),
            ping=HEARTBEAT_SECONDS,
            send_timeout=SEND_TIMEOUT_SECONDS,
        )

    async def _send_events(
        self, sender: Work, seen_revision: str, read_revision: ReadRevision
    ) -> AsyncIterator[ServerSentEvent]:
        self.open_count += 1
        try:
            with ExitStack() as held:  # here, because a stream that is never sent is never closed
                try:
                    held.enter_context(self._places.hold(sender))
                except (Overloaded, TooOften):  # streams that began at the same moment took the last places
                    return  # the browser opens the stream again, and is refused if there is still no place
                while True:
                    try:
                        revision = await anyio.to_thread.run_sync(read_revision, limiter=self._polls)
                    except sa.exc.SQLAlchemyError as error:
                        if find_fault(error) is Fault.BUG:
                            raise
                        revision = seen_revision  # no event until the database answers again
                    if revision is None:
                        yield ServerSentEvent(event="gone", data="")
                        return
                    if revision != seen_revision:
                        seen_revision = revision
                        yield ServerSentEvent(event="changed", id=revision, data=revision)
                    await anyio.sleep(self._poll_seconds)
        finally:
            self.open_count -= 1


@dataclass(frozen=True)
class OpenId:
    """The OpenID provider, and the grants that map its claims to roles."""

    provider: OpenIdProvider
    grants: Grants


@dataclass(frozen=True)
class Site:
    """State shared by all pages."""

    context: Context
    sessions: Sessions
    streams: Streams
    openid: OpenId | None = None

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

    `actor` is their name in the audit log, `csrf` the token of their forms. `notice`: about their
    last action, if any. `period`: the period of the figures.
    """

    project: Project
    role: VisitorRole
    actor: str
    csrf: str
    session: Session
    notice: str = ""
    period: Period = ALL_TIME

    def link(self, address: str) -> str:
        """The address of a page, with the same period."""
        return self.period.link(address)

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

_SAFE = ("GET", "HEAD")


def may_view(key: Key | None) -> bool:
    """Whether a key may sign in: it is active, bound to a project, and has the scope read."""
    return key is not None and key.project_id is not None and role_of_scopes(key.scopes) is not None


def find_visitor(tx: Transaction, site: Site, request: Request) -> Visitor | None:
    """The visitor of a request's cookie, if their key or session is still valid."""
    cookie = read_cookie(request, SESSION)
    sign_in = keys.find_sign_in(tx, cookie, site.clock()) if cookie.startswith(keys.SESSION_PREFIX) else None
    if sign_in is None:
        return None
    session, key, project = sign_in
    form_token = site.sessions.form_token(cookie)
    if session.key_id is not None:
        role = role_of_scopes(key.scopes) if key and may_come_from(key, read_address(request)) else None
        if key is None or project is None or role is None:
            return None
        return Visitor(project, role, f"key {key.name}", form_token, session)
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


async def read_form_token(request: Request) -> str:
    """The CSRF token of a form."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return ""
    return str((await request.form()).get("csrf", ""))


async def identify_visitor(request: Request, site: Site) -> Visitor | None:
    """The visitor of a request, found in a thread."""

    def find() -> Visitor | None:
        with site.database.reading() as tx:
            return find_visitor(tx, site, request)

    visitor = await to_thread.run_sync(find, limiter=LIMITS.get().authentication)
    if visitor is not None:
        LIMITS.get().sessions.add(read_cookie(request, SESSION), visitor.identity, visitor.project.id)
    return visitor


async def _require_visitor(request: Request, site: SiteOf) -> Visitor:
    visitor = await identify_visitor(request, site)
    if visitor is None:
        raise SignInRequired
    set_sender(visitor.identity, visitor.project.id)
    if not WORK.get().is_decision:
        hold_place(LIMITS.get().requests)
    return replace(visitor, notice=read_notice(request), period=read_period(request))


async def _require_form_token(
    request: Request, site: SiteOf, visitor: Annotated[Visitor, Depends(_require_visitor)]
) -> Visitor:
    if request.method not in _SAFE:
        token = await read_form_token(request)
        if is_cross_site(request) or not site.sessions.verify_form_token(read_cookie(request, SESSION), token):
            raise InvalidFormToken
    return visitor


SignedIn = Annotated[Visitor, Depends(_require_form_token)]
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

FollowRevision = Callable[[Callable[[Transaction], str | None]], Response]


async def _follow_revision(
    request: Request, site: SiteOf, seen: str = "", last_event_id: Annotated[str | None, Header()] = None
) -> FollowRevision:
    def follow(revision: Callable[[Transaction], str | None]) -> Response:
        def read_revision() -> str | None:
            with site.database.reading() as tx:
                return None if find_visitor(tx, site, request) is None else revision(tx)

        return site.streams.open_stream(WORK.get(), last_event_id or seen, read_revision)

    return follow


Follow = Annotated[FollowRevision, Depends(_follow_revision)]
"""Sends an event whenever a revision changes from the one that the page shows, which was rendered with it or got it by
the last event; the stream ends when the revision is None or the visitor is signed out."""
