"""Signing in by a key or a signed link, and out again."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from evalstop_service.pages.answers import PageRoute, page
from evalstop_service.pages.sessions import COOKIE, SESSION_SECONDS
from evalstop_service.pages.visitor import SignedIn, Site, SiteOf, foreign, known, may_look
from evalstop_service.store import keys

router = APIRouter(route_class=PageRoute)

_UNKNOWN_KEY = "No key in use has this secret. A key starts with esk_ and was shown once, when it was made."
_USELESS_KEY = "This key does not open the pages: it has to be bound to a project and have the scope read."
_DEAD_LINK = "This sign-in link is too old or was not made by this service. Start the service again for a new one."
_FOREIGN_FORM = "The form was sent from another site. Sign in here instead."


@router.get("/login")
def show_login(request: Request, site: SiteOf, token: str | None = None) -> Response:
    """The form; or, by a signed link, straight in."""
    target = local_path(request.query_params.get("next", "/"))
    if token is None:
        return _form(target)
    key_id = site.sessions.of_link(token)
    with site.database.reading() as tx:
        key = keys.find(tx, key_id) if key_id else None
    if key is None or not may_look(key):
        return _form(target, _DEAD_LINK, 401)
    # A strict cookie does not travel with a redirect that began on another site (a link in a chat): the page that is
    # answered instead goes on by itself.
    return _admit(page("signed_in.html", visitor=None, target=target), request, site, key.id)


@router.post("/login")
def sign_in(
    request: Request, site: SiteOf, key: Annotated[str, Form()] = "", target: Annotated[str, Form(alias="next")] = "/"
) -> Response:
    """Take a key, give a session."""
    target = local_path(target)
    if foreign(request):
        return _form(target, _FOREIGN_FORM, 403)
    with site.database.reading() as tx:
        found = keys.authenticate(tx, key.strip())
    if found is None:
        return _form(target, _UNKNOWN_KEY, 401)
    if not may_look(found):
        return _form(target, _USELESS_KEY, 403)
    return _admit(RedirectResponse(target, 303), request, site, found.id)


@router.get("/session")
def show_session(request: Request, site: SiteOf) -> Response:
    """Whether the visitor is signed in, for a page whose own request came from another site and had no cookie."""
    with site.database.reading() as tx:
        return JSONResponse({"signed_in": known(tx, site, request) is not None})


@router.post("/logout")
def sign_out(_visitor: SignedIn) -> Response:
    """Forget the session."""
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


def local_path(text: str) -> str:
    r"""The text if it is a path on this host, else `/`. Browsers read `//` and `/\` as another host and skip tabs."""
    plain = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if plain and all(" " < character != "\x7f" for character in text) else "/"


def _form(target: str, problem: str | None = None, status: int = 200) -> Response:
    return page("login.html", status, visitor=None, target=target, problem=problem)


def _admit(response: Response, request: Request, site: Site, key_id: UUID) -> Response:
    response.set_cookie(
        COOKIE,
        site.sessions.session(key_id),
        max_age=SESSION_SECONDS,
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response
