"""Signing in by an OpenID provider, and going from one project to another, which such a visitor may."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.errors import NotFound
from evalstop_service.security.openid import Begun, NotProved, ProviderAway
from evalstop_service.security.scopes import role_in
from evalstop_service.store import audit, projects, sessions
from evalstop_service.store.database import Transaction
from evalstop_service.store.projects import Project
from evalstop_service.store.sessions import Session
from evalstop_service.web.dashboard.cookies import FLOW, PROJECT, SESSION, drop_cookie, set_cookie
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.sessions import FLOW_SECONDS
from evalstop_service.web.dashboard.sign_in import local_path, login_form
from evalstop_service.web.dashboard.visitor import OpenId, SignedIn, Site, SiteOf, granted, user

router = APIRouter(route_class=PageRoute)

SESSION_SECONDS = 12 * 3600
"""A working day: then the provider is asked again, and what it says may have changed."""

_CALLBACK = "/openid/callback"

_LATE = "The sign-in took too long, or was begun in another browser. Start again from here."
_NOTHING = "You are known, but nothing here was granted to you. Ask whoever runs this service for a role in a project."


@router.get("/openid/start")
def begin(request: Request, site: SiteOf) -> Response:
    """Send the visitor to the provider; a link, because a form's redirect may not leave this host."""
    openid = _openid(site)
    target = local_path(request.query_params.get("next", "/"))
    try:
        url, begun = openid.provider.begin(_redirect_uri(request))
    except ProviderAway as error:
        return login_form(request, site, target, str(error), 502)
    response = RedirectResponse(url, 303)
    flow = site.sessions.flow(vars(begun) | {"next": target})
    # Not strict: the visitor comes back by a link on the provider's site.
    set_cookie(response, request, FLOW, flow, FLOW_SECONDS, samesite="lax")
    return response


@router.get(_CALLBACK)
def finish(request: Request, site: SiteOf) -> Response:
    """Take the provider's answer, and give a session to whom it names and something was granted."""
    openid = _openid(site)
    flow = site.sessions.of_flow(request.cookies.get(FLOW, ""))
    response = _finished(request, site, openid, flow) if flow else login_form(request, site, "/", _LATE, 401)
    drop_cookie(response, FLOW)  # an answer is good for one time
    return response


def _finished(request: Request, site: Site, openid: OpenId, flow: dict[str, Any]) -> Response:
    target = flow.pop("next")
    try:
        claims = openid.provider.finish(
            Begun(**flow), _redirect_uri(request), request.query_params, openid.grants.claims
        )
    except NotProved as error:
        return login_form(request, site, target, str(error), 401)
    except ProviderAway as error:
        return login_form(request, site, target, str(error), 502)
    now = site.clock()
    session = Session(
        issuer=openid.provider.issuer,
        subject=claims["sub"],
        name=openid.grants.name(claims),
        grants=openid.grants.of(claims),
        created_at=now,
        expires_at=now + timedelta(seconds=SESSION_SECONDS),
    )
    with site.database.transaction() as tx:
        open_to = granted(tx, session.grants)
        if not open_to:
            return login_form(request, site, target, _NOTHING, 403)
        token = sessions.create_session(tx, session)
        _enter(tx, session, open_to[0], site)
    # As with a signed link: a strict cookie does not travel with a redirect that began on another site.
    response = page("signed_in.html", visitor=None, target=target)
    set_cookie(response, request, SESSION, token, SESSION_SECONDS)
    set_cookie(response, request, PROJECT, str(open_to[0].id), SESSION_SECONDS)
    return response


@router.get("/projects")
def show_projects(site: SiteOf, visitor: SignedIn) -> Response:
    """The projects that the visitor may go to."""
    with site.database.reading() as tx:
        found = granted(tx, visitor.session.grants) if visitor.session else [visitor.project]
    roles = {
        project.id: role_in(visitor.session.grants, project.name) if visitor.session else visitor.role
        for project in found
    }
    return page("projects.html", visitor=visitor, projects=found, roles=roles)


@router.post("/projects")
def choose_project(request: Request, site: SiteOf, visitor: SignedIn, project: Annotated[UUID, Form()]) -> Response:
    """Go to another project."""
    if visitor.session is None:
        raise NotFound
    with site.database.transaction() as tx:
        wanted = projects.find_project(tx, project)
        if wanted is None or role_in(visitor.session.grants, wanted.name) is None:
            raise NotFound
        _enter(tx, visitor.session, wanted, site)
    response = RedirectResponse("/", 303)
    set_cookie(response, request, PROJECT, str(wanted.id), SESSION_SECONDS)
    return response


def _enter(tx: Transaction, session: Session, project: Project, site: Site) -> None:
    told = {"issuer": session.issuer, "subject": session.subject, "role": role_in(session.grants, project.name)}
    name = user(session)
    audit.record_action(tx, project.id, name, "session.opened", name, told, site.clock())


def _openid(site: Site) -> OpenId:
    if site.openid is None:
        raise NotFound
    return site.openid


def _redirect_uri(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}{_CALLBACK}"
