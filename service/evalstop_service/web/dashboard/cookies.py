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


def set_cookie(
    response: Response,
    request: Request,
    name: str,
    value: str,
    seconds: int,
    samesite: Literal["strict", "lax"] = "strict",
) -> None:
    """Set a cookie, Secure when the request came over https, or the service is reached by https."""
    context: Context = request.app.state.context
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path="/",
        secure=request.url.scheme == "https" or (context.public_url or "").startswith("https:"),
        httponly=True,
        samesite=samesite,
    )


def delete_cookie(response: Response, name: str) -> None:
    """Delete a cookie."""
    response.delete_cookie(name, path="/", httponly=True, samesite="strict")
