"""Signing in by a key or a signed link, and out again."""

from __future__ import annotations

import secrets
from typing import Annotated
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from evalstop_service.store import keys, sessions
from evalstop_service.web.dashboard.cookies import PROJECT, SESSION, VISIT, drop_cookie, set_cookie
from evalstop_service.web.dashboard.responses import PageRoute, page
from evalstop_service.web.dashboard.sessions import SESSION_SECONDS
from evalstop_service.web.dashboard.visitor import SignedIn, Site, SiteOf, foreign, known, may_look

router = APIRouter(route_class=PageRoute)

_UNKNOWN_KEY = "No key in use has this secret. A key starts with esk_ and was shown once, when it was made."
_USELESS_KEY = "This key does not open the pages: it has to be bound to a project and have the scope read."
_DEAD_LINK = "This sign-in link is too old or was not made by this service. Start the service again for a new one."
_FOREIGN_FORM = "The form was sent from another site, or your browser keeps no cookies. Sign in here instead."


@router.get("/login")
def show_login(request: Request, site: SiteOf, token: str | None = None) -> Response:
    """The form; or, by a signed link, straight in."""
    target = local_path(request.query_params.get("next", "/"))
    if token is None:
        return login_form(request, site, target)
    key_id = site.sessions.of_link(token)
    with site.database.reading() as tx:
        key = keys.find_key(tx, key_id) if key_id else None
    if key is None or not may_look(key):
        return login_form(request, site, target, _DEAD_LINK, 401)
    # A strict cookie does not travel with a redirect that began on another site (a link in a chat): the page that is
    # answered instead goes on by itself.
    return _admit(page("signed_in.html", visitor=None, target=target), request, site, key.id)


@router.post("/login")
def sign_in(
    request: Request,
    site: SiteOf,
    key: Annotated[str, Form()] = "",
    target: Annotated[str, Form(alias="next")] = "/",
    csrf: Annotated[str, Form()] = "",
) -> Response:
    """Take a key, give a session."""
    target = local_path(target)
    visit = request.cookies.get(VISIT, "")
    if foreign(request) or not visit or not site.sessions.is_form(visit, csrf):
        return login_form(request, site, target, _FOREIGN_FORM, 403)
    with site.database.reading() as tx:
        found = keys.authenticate_key(tx, key.strip())
    if found is None:
        return login_form(request, site, target, _UNKNOWN_KEY, 401)
    if not may_look(found):
        return login_form(request, site, target, _USELESS_KEY, 403)
    return _admit(RedirectResponse(target, 303), request, site, found.id)


@router.get("/session")
def show_session(request: Request, site: SiteOf) -> Response:
    """Whether the visitor is signed in, for a page whose own request came from another site and had no cookie."""
    with site.database.reading() as tx:
        return JSONResponse({"signed_in": known(tx, site, request) is not None})


@router.post("/logout")
def sign_out(request: Request, site: SiteOf, visitor: SignedIn) -> Response:
    """Forget the session; one that a provider vouched for is ended for whoever else may hold its cookie."""
    if visitor.session is not None:
        with site.database.transaction() as tx:
            sessions.delete_session(tx, request.cookies[SESSION])
    response = RedirectResponse("/login", 303)
    drop_cookie(response, SESSION)
    drop_cookie(response, PROJECT)
    return response


MOST_CHARACTERS = 2_000
"""Of the address to which a visitor comes back after signing in."""


def local_path(text: str) -> str:
    r"""The text if it is a path on this host, else `/`. Browsers read `//` and `/\` as another host and skip tabs.

    It travels in a cookie, which browsers drop when it is too large.
    """
    plain = text.startswith("/") and not text.startswith("//") and "\\" not in text and len(text) <= MOST_CHARACTERS
    return text if plain and all(" " < character != "\x7f" for character in text) else "/"


def login_form(request: Request, site: Site, target: str, problem: str | None = None, status: int = 200) -> Response:
    """The form to sign in by, for the browser that it is shown to."""
    visit = request.cookies.get(VISIT) or secrets.token_urlsafe(16)
    response = page(
        "login.html",
        status,
        visitor=None,
        target=target,
        problem=problem,
        token=site.sessions.form(visit),
        openid=f"/openid/start?{urlencode({'next': target})}" if site.openid else None,
    )
    set_cookie(response, request, VISIT, visit, SESSION_SECONDS)
    return response


def _admit(response: Response, request: Request, site: Site, key_id: UUID) -> Response:
    set_cookie(response, request, SESSION, site.sessions.session(key_id), SESSION_SECONDS)
    drop_cookie(response, PROJECT)
    return response
