"""Signed values: sign-in links of keys, OpenID sign-ins in progress, and form tokens."""

from __future__ import annotations

import hashlib
from typing import Any
from uuid import UUID

from itsdangerous import BadData, Signer, TimestampSigner, URLSafeTimedSerializer

from evalstop_service.clock import Clock

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
