"""Signing in with an OpenID provider, and switching projects afterwards."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.errors import NotFound, require
from evalstop_service.security.openid import ProviderUnavailable, SignInRefused, SignInState
from evalstop_service.security.scopes import find_role
from evalstop_service.store import audit, keys, projects
from evalstop_service.store.database import Transaction
from evalstop_service.store.keys import Session
from evalstop_service.store.projects import Project
from evalstop_service.web.pages.cookies import (
    FLOW,
    FLOW_SECONDS,
    PROJECT,
    SESSION,
    delete_cookie,
    read_cookie,
    set_cookie,
)
from evalstop_service.web.pages.responses import PageRoute, render_page
from evalstop_service.web.pages.sign_in import render_login_form, safe_path
from evalstop_service.web.pages.visitor import OpenId, SignedIn, Site, SiteOf, load_granted_projects, name_user

_log = logging.getLogger(__name__)

router = APIRouter(route_class=PageRoute)

SESSION_SECONDS = 12 * 3600
"""A working day. Then a new sign-in is required, because the groups may have changed."""

_CALLBACK = "/openid/callback"

_EXPIRED = "The sign-in took too long or was started in another browser. Try again."
_NO_GRANTS = "You are signed in, but you have no role in any project. Ask the operator of this service."


@router.get("/openid/start")
def start_sign_in(request: Request, site: SiteOf) -> Response:
    """Redirect to the provider. A link, because the content security policy keeps forms on this host."""
    openid = require(site.openid, "sign-in by OpenID Connect")
    target = safe_path(request.query_params.get("next", "/"))
    try:
        url, state = openid.provider.begin_sign_in(_redirect_uri(request, site))
    except ProviderUnavailable as error:
        return render_login_form(request, site, target, str(error), 502)
    response = RedirectResponse(url, 303)
    flow = site.sessions.sign_flow(vars(state) | {"next": target})
    # Not strict, because the visitor returns by a redirect from the provider's site.
    set_cookie(response, request, FLOW, flow, FLOW_SECONDS, samesite="lax")
    return response


@router.get(_CALLBACK)
def finish_sign_in(request: Request, site: SiteOf) -> Response:
    """Verify the provider's answer, and start a session for a user who has a role in a project."""
    openid = require(site.openid, "sign-in by OpenID Connect")
    flow = site.sessions.read_flow(read_cookie(request, FLOW))
    response = (
        _start_session(request, site, openid, flow) if flow else render_login_form(request, site, "/", _EXPIRED, 401)
    )
    delete_cookie(response, request, FLOW)  # an answer is valid once
    return response


def _start_session(request: Request, site: Site, openid: OpenId, flow: dict[str, Any]) -> Response:
    target = flow.pop("next")
    try:
        claims = openid.provider.finish_sign_in(
            SignInState(**flow), _redirect_uri(request, site), request.query_params, openid.grants.claims
        )
    except SignInRefused as error:
        return render_login_form(request, site, target, str(error), 401)
    except ProviderUnavailable as error:
        return render_login_form(request, site, target, str(error), 502)
    now = site.clock()
    session = Session(
        issuer=openid.provider.issuer,
        subject=claims["sub"],
        name=openid.grants.display_name(claims),
        grants=openid.grants.find_roles(claims),
        created_at=now,
        expires_at=now + timedelta(seconds=SESSION_SECONDS),
    )
    with site.database.transaction() as tx:
        granted = load_granted_projects(tx, session.grants)
        if not granted:
            groups = claims.get(openid.grants.groups_claim)
            _log.warning("%s has no role in an existing project; groups: %r", session.name, groups)
            return render_login_form(request, site, target, _NO_GRANTS, 403)
        token = keys.create_session(tx, session)
        _record_session(tx, session, granted[0], site)
    # A page instead of a redirect, as with a signed link: browsers would not send the strict cookie.
    response = render_page("signed_in.html", visitor=None, target=target)
    set_cookie(response, request, SESSION, token, SESSION_SECONDS)
    set_cookie(response, request, PROJECT, str(granted[0].id), SESSION_SECONDS)
    return response


@router.get("/projects")
def show_projects(site: SiteOf, visitor: SignedIn) -> Response:
    """The projects in which the visitor has a role."""
    with site.database.reading() as tx:
        by_key = visitor.session.key_id is not None
        granted = [visitor.project] if by_key else load_granted_projects(tx, visitor.session.grants)
    roles = {
        project.id: visitor.role if by_key else find_role(visitor.session.grants, project.name) for project in granted
    }
    return render_page("projects.html", visitor=visitor, projects=granted, roles=roles)


@router.post("/projects")
def switch_project(request: Request, site: SiteOf, visitor: SignedIn, project: Annotated[UUID, Form()]) -> Response:
    """Switch to another project."""
    with site.database.transaction() as tx:
        selected = projects.find_project(tx, project)
        if selected is None or find_role(visitor.session.grants, selected.name) is None:
            raise NotFound
        _record_session(tx, visitor.session, selected, site)
    response = RedirectResponse("/", 303)
    set_cookie(response, request, PROJECT, str(selected.id), SESSION_SECONDS)
    return response


def _record_session(tx: Transaction, session: Session, project: Project, site: Site) -> None:
    details = {"issuer": session.issuer, "subject": session.subject, "role": find_role(session.grants, project.name)}
    name = name_user(session)
    audit.record_action(tx, project.id, name, "session.opened", name, details, site.clock())


def _redirect_uri(request: Request, site: Site) -> str:
    """The URL to which the provider returns the browser; a configured public URL takes precedence over the
    request's."""
    base = site.context.public_url or f"{request.url.scheme}://{request.url.netloc}"
    return f"{base.rstrip('/')}{_CALLBACK}"
