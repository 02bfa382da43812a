"""Signed and timed: the session in a visitor's cookie, and the token of a sign-in link. Both name a key by its id."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from itsdangerous import BadData, TimestampSigner, URLSafeTimedSerializer

from evalstop_service.clock import Clock

COOKIE = "evalstop_session"
SESSION_SECONDS = 7 * 24 * 3600
LINK_SECONDS = 12 * 3600


class Sessions:
    """Makes and reads them. What was signed for one purpose is worth nothing for the other."""

    def __init__(self, secret: str, clock: Clock) -> None:
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
