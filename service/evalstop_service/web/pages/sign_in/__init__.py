"""Signing in with a key, a signed link or an OpenID provider; signing out, and switching projects."""

from __future__ import annotations

import logging
import math
import secrets
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.errors import NotFound, TooOften, require
from evalstop_service.security.openid import OpenIdProvider, ProviderUnavailable, SignInRefused, SignInState
from evalstop_service.security.scopes import find_role
from evalstop_service.store import audit, keys, projects
from evalstop_service.store.database import Transaction
from evalstop_service.store.keys import Key, Session
from evalstop_service.store.projects import Project
from evalstop_service.web.context import read_address
from evalstop_service.web.pages import cookies
from evalstop_service.web.pages import visitor as visitors
from evalstop_service.web.pages.cookies import FLOW, PROJECT, SESSION, SIGN_IN_FORM, delete_cookie, read_cookie
from evalstop_service.web.pages.responses import PageRoute, render_page, send_json
from evalstop_service.web.pages.visitor import SignedIn, Site, SiteOf

_log = logging.getLogger(__name__)

router = APIRouter(route_class=PageRoute)

_SIGN_IN_AGAIN = "Sign in again: this change needs a recent sign-in."
_UNKNOWN_KEY = "No active key has this secret. Keys start with esk_ and are shown once, when they are created."
_TOO_OFTEN = "Too many wrong keys came from your address. Try again in"
_INSUFFICIENT_KEY = "This key cannot sign in: it needs a project and the scope read."
_INVALID_LINK = "This sign-in link has expired or is not valid: sign in with a key."
_CROSS_SITE_FORM = "The form was sent from another site, or your browser blocks cookies. Sign in here instead."


@router.get("/login")
def show_login(request: Request, site: SiteOf, token: str | None = None) -> Response:
    """The sign-in form. A signed link signs in without it."""
    target = safe_path(request.query_params.get("next", "/"))
    if token is None:
        message = _SIGN_IN_AGAIN if "again" in request.query_params else None
        return render_login_form(request, site, target, message)
    key_id = site.sessions.read_link(token)
    with site.database.reading() as tx:
        key = keys.find_key(tx, key_id, site.clock()) if key_id else None
    if key is None or not visitors.may_view(key):
        return render_login_form(request, site, target, _INVALID_LINK, 401)
    # Browsers do not send a strict cookie after a redirect that began on another site, such as a link in a chat, so
    # this is a page that redirects by script.
    return _open_session(render_page("signed_in.html", visitor=None, target=target), request, site, key)


@router.post("/login")
def sign_in(
    request: Request,
    site: SiteOf,
    key: Annotated[str, Form()] = "",
    target: Annotated[str, Form(alias="next")] = "/",
    csrf: Annotated[str, Form()] = "",
) -> Response:
    """Sign in with a key."""
    target = safe_path(target)
    form_id = read_cookie(request, SIGN_IN_FORM)
    if visitors.is_cross_site(request) or not form_id or not site.sessions.verify_form_token(form_id, csrf):
        return render_login_form(request, site, target, _CROSS_SITE_FORM, 403)
    try:
        authenticated = site.context.key_cache.authenticate(key.strip(), read_address(request))
    except TooOften as error:
        return render_login_form(request, site, target, f"{_TOO_OFTEN} {math.ceil(error.seconds)} seconds.", 429)
    if authenticated is None:
        return render_login_form(request, site, target, _UNKNOWN_KEY, 401)
    if not visitors.may_view(authenticated):
        return render_login_form(request, site, target, _INSUFFICIENT_KEY, 403)
    return _open_session(RedirectResponse(target, 303), request, site, authenticated)


@router.get("/session")
def show_session(request: Request, site: SiteOf) -> Response:
    """Whether the visitor is signed in, for a page that was requested from another site, without the cookie."""
    with site.database.reading() as tx:
        return send_json({"signed_in": visitors.find_visitor(tx, site, request) is not None})


@router.post("/logout")
def sign_out(request: Request, site: SiteOf, visitor: SignedIn) -> Response:
    """End the session and delete its cookie."""
    with site.database.transaction() as tx:
        keys.delete_session(tx, visitor.session.id)
    response = RedirectResponse("/login", 303)
    delete_cookie(response, request, SESSION)
    delete_cookie(response, request, PROJECT)
    return response


LONGEST_PATH = 2_000
"""Longer paths would not fit into the cookie."""


def safe_path(text: str) -> str:
    r"""The text if it is a path on this host, else `/`. Browsers read `//` and `/\` as another host and skip tabs."""
    plain = text.startswith("/") and not text.startswith("//") and "\\" not in text and len(text) <= LONGEST_PATH
    return text if plain and all(" " < character != "\x7f" for character in text) else "/"


def render_login_form(request: Request, site: Site, target: str, problem: str | None, status: int = 200) -> Response:
    """The sign-in form, whose token is valid in this browser only."""
    form_id = read_cookie(request, SIGN_IN_FORM) or secrets.token_urlsafe(16)
    response = render_page(
        "login.html",
        status,
        visitor=None,
        target=target,
        problem=problem,
        token=site.sessions.form_token(form_id),
        openid=f"/openid/start?{urlencode({'next': target})}" if site.openid else None,
    )
    cookies.set_cookie(response, request, SIGN_IN_FORM, form_id, cookies.SESSION_SECONDS)
    return response


def _open_session(response: Response, request: Request, site: Site, key: Key) -> Response:
    now = site.clock()
    session = Session("", "", key.name, {}, now, now + timedelta(seconds=cookies.SESSION_SECONDS), key.id)
    return _store_session(response, request, site, session)


def _store_session(
    response: Response, request: Request, site: Site, session: Session, project: Project | None = None
) -> Response:
    """Start a session in the browser, with a project if several may be selected."""
    with site.database.transaction() as tx:
        token = keys.create_session(tx, session)
        if project is not None:
            _record_session(tx, session, project, site)
    seconds = int((session.expires_at - session.created_at).total_seconds())
    cookies.set_cookie(response, request, SESSION, token, seconds)
    if project is None:
        delete_cookie(response, request, PROJECT)
    else:
        cookies.set_cookie(response, request, PROJECT, str(project.id), seconds)
    return response


OPENID_SECONDS = 12 * 3600
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
        url, state = openid.begin_sign_in(_redirect_uri(request, site))
    except ProviderUnavailable as error:
        return render_login_form(request, site, target, str(error), 502)
    response = RedirectResponse(url, 303)
    flow = site.sessions.sign_flow(vars(state) | {"next": target})
    cookies.set_cookie(response, request, FLOW, flow, cookies.FLOW_SECONDS)
    return response


@router.get(_CALLBACK)
def finish_sign_in(request: Request, site: SiteOf) -> Response:
    """Verify the provider's answer, and start a session for a user who has a role in a project."""
    openid = require(site.openid, "sign-in by OpenID Connect")
    flow = site.sessions.read_flow(read_cookie(request, FLOW))
    response = (
        _open_granted_session(request, site, openid, flow)
        if flow
        else render_login_form(request, site, "/", _EXPIRED, 401)
    )
    delete_cookie(response, request, FLOW)  # an answer is valid once
    return response


def _open_granted_session(request: Request, site: Site, openid: OpenIdProvider, flow: dict[str, Any]) -> Response:
    target = flow.pop("next")
    try:
        claims = openid.finish_sign_in(SignInState(**flow), _redirect_uri(request, site), request.query_params)
    except SignInRefused as error:
        return render_login_form(request, site, target, str(error), 401)
    except ProviderUnavailable as error:
        return render_login_form(request, site, target, str(error), 502)
    now = site.clock()
    session = Session(
        issuer=openid.issuer,
        subject=claims["sub"],
        name=openid.grants.display_name(claims),
        grants=openid.grants.find_roles(claims),
        created_at=now,
        expires_at=now + timedelta(seconds=OPENID_SECONDS),
    )
    with site.database.reading() as tx:
        granted = visitors.load_granted_projects(tx, session.grants)
    if not granted:
        groups = claims.get(openid.grants.groups_claim)
        _log.warning("%s has no role in an existing project; groups: %r", session.name, groups)
        return render_login_form(request, site, target, _NO_GRANTS, 403)
    # A page instead of a redirect, as with a signed link: browsers would not send the strict cookie.
    response = render_page("signed_in.html", visitor=None, target=target)
    return _store_session(response, request, site, session, granted[0])


@router.get("/projects")
def show_projects(site: SiteOf, visitor: SignedIn) -> Response:
    """The projects that give the visitor a role."""
    with site.database.reading() as tx:
        by_key = visitor.session.key_id is not None
        granted = [visitor.project] if by_key else visitors.load_granted_projects(tx, visitor.session.grants)
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
    cookies.set_cookie(response, request, PROJECT, str(selected.id), OPENID_SECONDS)
    return response


def _record_session(tx: Transaction, session: Session, project: Project, site: Site) -> None:
    details = {"issuer": session.issuer, "subject": session.subject, "role": find_role(session.grants, project.name)}
    name = visitors.name_user(session)
    audit.record_action(tx, project.id, name, "session.opened", name, details, site.clock())


def _redirect_uri(request: Request, site: Site) -> str:
    """The URL to which the provider returns the browser; a configured public URL takes precedence over the
    request's."""
    base = site.context.public_url or f"{request.url.scheme}://{request.url.netloc}"
    return f"{base.rstrip('/')}{_CALLBACK}"
