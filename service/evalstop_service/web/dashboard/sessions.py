"""What is signed: sessions and sign-in links, which name a key, a sign-in under way elsewhere, and tokens of forms."""

from __future__ import annotations

import hashlib
from typing import Any
from uuid import UUID

from itsdangerous import BadData, Signer, TimestampSigner, URLSafeTimedSerializer

from evalstop_service.clock import Clock

SESSION_SECONDS = 7 * 24 * 3600
LINK_SECONDS = 12 * 3600
FLOW_SECONDS = 600


class Sessions:
    """Makes and reads them. What was signed for one purpose is worth nothing for another."""

    def __init__(self, secret: str, clock: Clock) -> None:
        self._flow = _serializer(secret, "evalstop.openid", clock)
        self._form = Signer(secret, salt="evalstop.form", key_derivation="hmac", digest_method=hashlib.sha256)
        self._session = _serializer(secret, "evalstop.session", clock)
        self._link = _serializer(secret, "evalstop.link", clock)

    def session(self, key_id: UUID) -> str:
        """The value of a cookie, good for a week."""
        return _dump(self._session, key_id)

    def link(self, key_id: UUID) -> str:
        """The token of a sign-in link, good for twelve hours."""
        return _dump(self._link, key_id)

    def of_session(self, text: str) -> UUID | None:
        """The key that a cookie names; None when it is forged or too old."""
        return _load(self._session, text, SESSION_SECONDS)

    def of_link(self, text: str) -> UUID | None:
        """The key that a sign-in token names; None when it is forged or too old."""
        return _load(self._link, text, LINK_SECONDS)

    def flow(self, begun: dict[str, str]) -> str:
        """A sign-in that goes on at an OpenID provider, for the browser to keep for ten minutes."""
        return self._flow.dumps(begun)

    def of_flow(self, text: str) -> dict[str, str] | None:
        """The sign-in that a browser kept; None when it is forged or too old."""
        try:
            begun: dict[str, str] = self._flow.loads(text, max_age=FLOW_SECONDS)
        except BadData:
            return None
        return begun

    def form(self, cookie: str) -> str:
        """The token that goes with every form of the session in this cookie, so that no other site can send one.

        It is the same as long as the session is: a page that is rendered again reads as before.
        """
        return self._form.get_signature(cookie).decode()

    def is_form(self, cookie: str, token: str) -> bool:
        """Whether a token goes with the session in this cookie."""
        return self._form.verify_signature(cookie, token)


class _ClockedSigner(TimestampSigner):
    def __init__(self, *args: Any, clock: Clock, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clock = clock

    def get_timestamp(self) -> int:
        return int(self._clock().timestamp())


def _serializer(secret: str, purpose: str, clock: Clock) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(secret, salt=purpose, signer=_ClockedSigner, signer_kwargs={"clock": clock})


def _dump(serializer: URLSafeTimedSerializer, key_id: UUID) -> str:
    return serializer.dumps(str(key_id))


def _load(serializer: URLSafeTimedSerializer, text: str, max_age_seconds: int) -> UUID | None:
    try:
        return UUID(serializer.loads(text, max_age=max_age_seconds))
    except (BadData, ValueError, TypeError, AttributeError):
        return None
