"""Keys looked up a moment ago, so that not every request asks the database who is speaking."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass

import sqlalchemy as sa

from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Key

_log = logging.getLogger(__name__)

MOST_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class _Seen:
    key: Key
    stale_from: float
    until: float


class Keyring:
    """Knows a key for `seconds` after it was found in the database; 0 asks every time.

    A key in use is asked for again, by a thread beside, when half of its time is over: its many users never all wait
    for the database together. A key that is revoked stops working at once in the process that revoked it, elsewhere
    within `seconds`. A secret is remembered by its hash alone, and a wrong one not at all.
    """

    def __init__(self, database: Database, seconds: float) -> None:
        self._database, self._seconds = database, seconds
        self._lock = threading.Lock()
        self._seen: dict[bytes, _Seen] = {}
        self._forgotten = 0
        self._asking: set[bytes] = set()

    def known(self, secret: str) -> Key | None:
        """The key with this secret, if it was found a moment ago."""
        digest, now = _digest(secret), time.monotonic()
        seen = self._seen.get(digest)
        if seen is None or now >= seen.until:
            return None
        if now >= seen.stale_from and digest not in self._asking:
            self._asking.add(digest)
            threading.Thread(target=self._ask_again, args=(secret, digest), name="keyring", daemon=True).start()
        return seen.key

    def authenticate(self, secret: str) -> Key | None:
        """The unrevoked key with this secret, from memory or from the database."""
        return self.known(secret) or self._ask(secret)

    def forget(self) -> None:
        """Ask the database again for every key: one was revoked."""
        with self._lock:
            self._seen.clear()
            self._forgotten += 1

    def _ask_again(self, secret: str, digest: bytes) -> None:
        try:
            if self._ask(secret) is None:
                self._seen.pop(digest, None)
        except sa.exc.SQLAlchemyError as error:
            _log.warning("a key cannot be looked up again (%s); it is known for a moment longer", error)
        finally:
            self._asking.discard(digest)

    def _ask(self, secret: str) -> Key | None:
        asked, forgotten = time.monotonic(), self._forgotten
        with self._database.reading() as tx:
            key = keys.authenticate(tx, secret)
        if key is not None and self._seconds > 0:
            with self._lock:
                if len(self._seen) >= MOST_KEYS:
                    self._seen.clear()
                if self._forgotten == forgotten:  # else the key may have been revoked since it was read
                    self._seen[_digest(secret)] = _Seen(key, asked + self._seconds / 2, asked + self._seconds)
        return key


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
