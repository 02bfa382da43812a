"""Cookies of the pages, and what is signed in them.

All cookies are HttpOnly, and all but the OpenID flow are SameSite=Strict.
"""

from __future__ import annotations

import hashlib
from typing import Any
from uuid import UUID

from fastapi import Request, Response
from itsdangerous import BadData, Signer, TimestampSigner, URLSafeTimedSerializer

from evalstop_service.clock import Clock
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


def set_cookie(response: Response, request: Request, name: str, value: str, seconds: int) -> None:
    """Set a cookie, Secure when the request came over https, or the service is reached by https."""
    response.set_cookie(
        _full_name(request, name),
        value,
        max_age=seconds,
        path="/",
        secure=_is_secure(request),
        httponly=True,
        # Of the flow not strict, because the visitor returns by a redirect from the provider's site.
        samesite="lax" if name == FLOW else "strict",
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


SESSION_SECONDS = 7 * 24 * 3600
"""Duration of a session that was started with a key."""

FRESH_SECONDS = 900
"""How long after a sign-in changes that allow more stops, or grant access, need no new sign-in."""

LINK_SECONDS = 12 * 3600
FLOW_SECONDS = 600


class Sessions:
    """Signs and verifies values. A value signed for one purpose is invalid for every other."""

    def __init__(self, secret: str, clock: Clock) -> None:
        self._flow = _create_serializer(secret, "evalstop.openid", clock)
        self._form = Signer(secret, salt="evalstop.form", key_derivation="hmac", digest_method=hashlib.sha256)
        self._link = _create_serializer(secret, "evalstop.link", clock)

    def sign_link(self, key_id: UUID) -> str:
        """The token of a sign-in link, valid for twelve hours."""
        return self._link.dumps(str(key_id))

    def read_link(self, text: str) -> UUID | None:
        """The key of a sign-in token; None if it is forged or expired."""
        try:
            return UUID(self._link.loads(text, max_age=LINK_SECONDS))
        except (BadData, ValueError, TypeError, AttributeError):
            return None

    def sign_flow(self, flow: dict[str, str]) -> str:
        """Sign the state of an OpenID sign-in, which the browser stores for ten minutes."""
        return self._flow.dumps(flow)

    def read_flow(self, text: str) -> dict[str, str] | None:
        """The state of an OpenID sign-in; None when it is forged or expired."""
        try:
            flow: dict[str, str] = self._flow.loads(text, max_age=FLOW_SECONDS)
        except BadData:
            return None
        return flow

    def form_token(self, cookie: str) -> str:
        """The CSRF token of the session in this cookie.

        It stays the same during a session, so that repeated rendering of a page gives the same result.
        """
        return self._form.get_signature(cookie).decode()

    def verify_form_token(self, cookie: str, token: str) -> bool:
        """Whether the token belongs to the session in this cookie."""
        return self._form.verify_signature(cookie, token)


class _ClockedSigner(TimestampSigner):
    def __init__(self, *args: Any, clock: Clock, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clock = clock

    def get_timestamp(self) -> int:
        return int(self._clock().timestamp())


def _create_serializer(secret: str, purpose: str, clock: Clock) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(secret, salt=purpose, signer=_ClockedSigner, signer_kwargs={"clock": clock})
