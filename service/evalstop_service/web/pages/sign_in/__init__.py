"""Signing in with a key or a signed link, and signing out."""

from __future__ import annotations

import math
import secrets
from datetime import timedelta
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.errors import TooOften
from evalstop_service.store import keys
from evalstop_service.store.keys import Key, Session
from evalstop_service.web.context import read_address
from evalstop_service.web.pages.cookies import (
    PROJECT,
    SESSION,
    SESSION_SECONDS,
    SIGN_IN_FORM,
    delete_cookie,
    read_cookie,
    set_cookie,
)
from evalstop_service.web.pages.responses import PageRoute, render_page, send_json
from evalstop_service.web.pages.visitor import SignedIn, Site, SiteOf, find_visitor, is_cross_site, may_view

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
    if key is None or not may_view(key):
        return render_login_form(request, site, target, _INVALID_LINK, 401)
    # Browsers do not send a strict cookie after a redirect that began on another site, such as a link in a chat, so
    # this is a page that redirects by script.
    return _start_session(render_page("signed_in.html", visitor=None, target=target), request, site, key)


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
    if is_cross_site(request) or not form_id or not site.sessions.verify_form_token(form_id, csrf):
        return render_login_form(request, site, target, _CROSS_SITE_FORM, 403)
    try:
        authenticated = site.context.key_cache.authenticate(key.strip(), read_address(request))
    except TooOften as error:
        return render_login_form(request, site, target, f"{_TOO_OFTEN} {math.ceil(error.seconds)} seconds.", 429)
    if authenticated is None:
        return render_login_form(request, site, target, _UNKNOWN_KEY, 401)
    if not may_view(authenticated):
        return render_login_form(request, site, target, _INSUFFICIENT_KEY, 403)
    return _start_session(RedirectResponse(target, 303), request, site, authenticated)


@router.get("/session")
def show_session(request: Request, site: SiteOf) -> Response:
    """Whether the visitor is signed in, for a page that was requested from another site, without the cookie."""
    with site.database.reading() as tx:
        return send_json({"signed_in": find_visitor(tx, site, request) is not None})


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
    set_cookie(response, request, SIGN_IN_FORM, form_id, SESSION_SECONDS)
    return response


def _start_session(response: Response, request: Request, site: Site, key: Key) -> Response:
    now = site.clock()
    session = Session("", "", key.name, {}, now, now + timedelta(seconds=SESSION_SECONDS), key.id)
    with site.database.transaction() as tx:
        token = keys.create_session(tx, session)
    set_cookie(response, request, SESSION, token, SESSION_SECONDS)
    delete_cookie(response, request, PROJECT)
    return response
