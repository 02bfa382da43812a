"""Keys looked up a moment ago, so that not every request asks the database who is speaking."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass

from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Key

MOST_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class _Seen:
    key: Key
    until: float


class Keyring:
    """Knows a key for `seconds` after it was found in the database; 0 asks every time.

    A key that is revoked stops working at once in the process that revoked it, elsewhere within `seconds`. A secret is
    remembered by its hash alone, and a wrong one not at all.
    """

    def __init__(self, database: Database, seconds: float) -> None:
        self._database, self._seconds = database, seconds
        self._lock = threading.Lock()
        self._seen: dict[bytes, _Seen] = {}
        self._forgotten = 0

    def known(self, secret: str) -> Key | None:
        """The key with this secret, if it was found a moment ago."""
        seen = self._seen.get(_digest(secret))
        return seen.key if seen is not None and time.monotonic() < seen.until else None

    def authenticate(self, secret: str) -> Key | None:
        """The unrevoked key with this secret, from memory or from the database."""
        found = self.known(secret)
        if found is not None:
            return found
        asked, forgotten = time.monotonic(), self._forgotten
        with self._database.reading() as tx:
            key = keys.authenticate(tx, secret)
        if key is not None and self._seconds > 0:
            with self._lock:
                if len(self._seen) >= MOST_KEYS:
                    self._seen.clear()
                if self._forgotten == forgotten:  # else the key may have been revoked since it was read
                    self._seen[_digest(secret)] = _Seen(key, asked + self._seconds)
        return key

    def forget(self) -> None:
        """Ask the database again for every key: one was revoked."""
        with self._lock:
            self._seen.clear()
            self._forgotten += 1


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
