"""The cookies of the pages: none is seen by scripts, and all but one are sent by this site alone."""

from __future__ import annotations

from typing import Literal

from fastapi import Request, Response

SESSION = "evalstop_session"
"""Who is signed in."""

PROJECT = "evalstop_project"
"""Which of their projects they look at."""

VISIT = "evalstop_visit"
"""Which browser was shown the form to sign in."""

FLOW = "evalstop_openid"
"""What a browser that was sent to an OpenID provider has to come back with."""


def set_cookie(
    response: Response,
    request: Request,
    name: str,
    value: str,
    seconds: int,
    samesite: Literal["strict", "lax"] = "strict",
) -> None:
    """Have the browser keep a cookie for so long, and send it over https alone where it came so."""
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite=samesite,
    )


def drop_cookie(response: Response, name: str) -> None:
    """Have the browser forget a cookie."""
    response.delete_cookie(name, path="/", httponly=True, samesite="strict")
