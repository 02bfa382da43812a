"""Caches API keys, so that not every request reads the database to authenticate."""

from __future__ import annotations

import asyncio
import hashlib
import threading

from anyio import to_thread
from cachetools import TTLCache

from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Key

MOST_KEYS = 10_000


class KeyCache:
    """Keeps a key for `seconds` after it was read; 0 keeps none.

    A revoked key stops working at once in the process that revoked it, elsewhere within `seconds`. The cache holds
    hashes of secrets, and nothing about wrong ones.
    """

    def __init__(self, database: Database, seconds: float) -> None:
        self._database = database
        self._keys: TTLCache[bytes, Key] = TTLCache(MOST_KEYS, seconds)
        self._lock = threading.Lock()
        self._clears = 0
        self._reads: dict[tuple[str, int], asyncio.Task[Key | None]] = {}  # under way on the event loop

    def get(self, secret: str) -> Key | None:
        """The key with this secret, if it is in the cache."""
        with self._lock:
            try:
                return self._keys[_digest(secret)]  # half as long as `get`, which asks twice for the time
            except KeyError:
                return None

    def authenticate(self, secret: str) -> Key | None:
        """The unrevoked key with this secret, from the cache or the database."""
        return self.get(secret) or self._load(secret)

    async def authenticate_together(self, secret: str) -> Key | None:
        """The same on an event loop: requests whose key is not in the cache share one read of it, in a thread.

        Without this, all requests of a busy key would read the database at the moment when the cache lets go of it.
        """
        key = self.get(secret)
        if key is not None:
            return key
        place = secret, self._clears  # what was begun before a key was revoked may not let it in afterwards
        read = self._reads.get(place)
        if read is None:
            read = self._reads[place] = asyncio.create_task(to_thread.run_sync(self._load, secret))
            read.add_done_callback(lambda _: self._reads.pop(place))
        return await asyncio.shield(read)  # a request that is given up leaves the read to the others

    def clear(self) -> None:
        """Empty the cache: a key was revoked."""
        with self._lock:
            self._keys.clear()
            self._clears += 1

    def _load(self, secret: str) -> Key | None:
        clears = self._clears
        with self._database.reading() as tx:
            key = keys.authenticate_key(tx, secret)
        with self._lock:
            if key is not None and self._clears == clears:  # else it may have been revoked since it was read
                self._keys[_digest(secret)] = key
        return key


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
