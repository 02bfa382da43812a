"""The sessions that were recently found valid, so that a cookie can be recognized without reading the database."""

from __future__ import annotations

import hashlib
import threading

from cachetools import TTLCache
from starlette.requests import cookie_parser

RECENT_SECONDS = 300.0
MOST_SESSIONS = 10_000


class RecentSessions:
    """Thread-safe. Holds digests, not the secrets of sessions."""

    def __init__(self) -> None:
        self._digests: TTLCache[bytes, bool] = TTLCache(MOST_SESSIONS, RECENT_SECONDS)
        self._lock = threading.Lock()

    def add(self, cookie: str) -> None:
        """Remember the cookie of a session that was found valid."""
        with self._lock:
            self._digests[_digest(cookie)] = True

    def is_recent(self, header: bytes) -> bool:
        """Whether a header `Cookie` has the cookie of such a session."""
        digests = [_digest(value) for value in cookie_parser(header.decode("latin-1")).values()]
        with self._lock:
            return any(digest in self._digests for digest in digests)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()
