"""Cookies of the pages: all are HttpOnly, and all but the OpenID flow are SameSite=Strict."""

from __future__ import annotations

from typing import Literal

from fastapi import Request, Response

from evalstop_service.web.context import Context

SESSION = "evalstop_session"
"""Who is signed in."""

PROJECT = "evalstop_project"
"""Which of their projects is selected."""

SIGN_IN_FORM = "evalstop_visit"
"""Which browser the sign-in form was rendered for."""

FLOW = "evalstop_openid"
"""The state of a sign-in at an OpenID provider, checked when the browser returns."""


HOST_PREFIX = "__Host-"
"""Prefix of names that browsers accept only from this host and over https, so that no other host of the domain can set
such a cookie."""


def set_cookie(
    response: Response,
    request: Request,
    name: str,
    value: str,
    seconds: int,
    samesite: Literal["strict", "lax"] = "strict",
) -> None:
    """Set a cookie, Secure when the request came over https, or the service is reached by https."""
    response.set_cookie(
        _full_name(request, name),
        value,
        max_age=seconds,
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite=samesite,
    )


def read_cookie(request: Request, name: str) -> str:
    """The value of a cookie, empty if there is none. If cookies are Secure, one without the prefix is ignored."""
    return request.cookies.get(_full_name(request, name), "")


def delete_cookie(response: Response, request: Request, name: str) -> None:
    """Delete a cookie."""
    secure = _is_secure(request)
    response.delete_cookie(_full_name(request, name), path="/", secure=secure, httponly=True, samesite="strict")


def _full_name(request: Request, name: str) -> str:
    return f"{HOST_PREFIX}{name}" if _is_secure(request) else name


def _is_secure(request: Request) -> bool:
    context: Context = request.app.state.context
    return request.url.scheme == "https" or (context.public_url or "").startswith("https:")
