"""Caches API keys, so that not every request reads the database to authenticate."""

from __future__ import annotations

import hashlib
import logging
import threading
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread
from cachetools import TTLCache

from evalstop_service.background import PeriodicJob
from evalstop_service.clock import Clock, utc_now
from evalstop_service.errors import TooOften
from evalstop_service.security.address_policy import is_within
from evalstop_service.security.rate_limits import Rate, RateLimit
from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Key

log = logging.getLogger(__name__)

MOST_KEYS = 10_000

WRONG_KEYS = Rate(burst=20, per_second=0.5)
"""Limit on different wrong keys from one address, in one process."""

RECORD_SECONDS = 2.0
"""How long a use waits for others, to be recorded with them."""

THREADS = 4
"""How many keys are read at a time."""

WRONG_SECONDS = 60.0
"""How long a wrong key is remembered, so that a trainer with a revoked key does not lock out others at its address."""


class KeyCache:
    """Caches a key for `seconds` after it was read.

    A revoked or expired key stops working at once in the process that revoked it, elsewhere within `seconds`. The cache
    holds hashes of secrets. A wrong secret never becomes valid, and is remembered as wrong for a while; an address that
    sends many different wrong ones has to wait before the database is queried again for it.
    """

    def __init__(
        self, database: Database, seconds: float = 5.0, clock: Clock = utc_now, wrong_keys: Rate = WRONG_KEYS
    ) -> None:
        self._database, self._clock = database, clock
        self._wrong_keys = RateLimit(wrong_keys)
        self._keys: TTLCache[bytes, Key] = TTLCache(MOST_KEYS, seconds)
        self._wrong: TTLCache[bytes, bool] = TTLCache(MOST_KEYS, WRONG_SECONDS)
        self._lock = threading.Lock()
        self._threads = CapacityLimiter(THREADS)
        self._used: dict[UUID, datetime] = {}  # keys whose use is to be recorded
        self._clears = 0

    def get(self, secret: str) -> Key | None:
        """The key with this secret, if cached. Its networks are not checked."""
        with self._lock:
            try:
                return self._keys[_digest(secret)]  # half the time of `get`, which reads the clock twice
            except KeyError:
                return None

    def authenticate(self, secret: str, address: str, urgent: bool = False) -> Key | None:
        """The valid key with this secret, from the cache or the database, if it may be used from the address.

        `urgent`: skip the limit on wrong keys, because a veto must be accepted even if others behind the same proxy
        send wrong keys. Raises TooOften.
        """
        return _accept_key(self.get(secret) or self._load_key(secret, address, urgent), address)

    async def authenticate_in_thread(
        self, secret: str, address: str, urgent: bool = False, threads: CapacityLimiter | None = None
    ) -> Key | None:
        """Like `authenticate`, on an event loop: the database is read in a thread (one of `threads`).

        There are few threads, so that many requests whose key has just left the cache read it a few times.
        """
        key = self.get(secret)
        if key is not None or self._is_wrong(secret):
            return _accept_key(key, address)
        return await to_thread.run_sync(self.authenticate, secret, address, urgent, limiter=threads or self._threads)

    def clear(self) -> None:
        """Empty the cache after a key was revoked."""
        with self._lock:
            self._keys.clear()
            self._clears += 1

    def _load_key(self, secret: str, address: str, urgent: bool) -> Key | None:
        clears, now = self._clears, self._clock()
        if self._is_wrong(secret):
            return None
        if not urgent and (wait := self._wrong_keys.find_wait(address)):
            raise TooOften("too many wrong keys from this address", wait)
        try:
            key = self._read_key(secret, now)
        except sa.exc.DBAPIError as error:
            if not error.connection_invalidated:
                raise
            key = self._read_key(secret, now)  # a connection was closed while it was idle; the pool has dropped them
        if key is None:
            self._wrong_keys.spend(address)
            with self._lock:
                self._wrong[_digest(secret)] = True
            return None
        is_recent = key.last_used_at is not None and now - key.last_used_at < timedelta(seconds=keys.USE_SECONDS)
        with self._lock:
            if not is_recent:
                self._used[key.id] = now
            if self._clears == clears:  # otherwise it may have been revoked since it was read
                self._keys[_digest(secret)] = key
        return key

    def _read_key(self, secret: str, now: datetime) -> Key | None:
        with self._database.reading() as tx:
            return keys.authenticate_key(tx, secret, now)

    def _is_wrong(self, secret: str) -> bool:
        """Whether no key has this secret, as far as that is known without the database."""
        if not keys.is_well_formed(secret):
            return True
        with self._lock:
            return _digest(secret) in self._wrong

    def record_uses(self) -> None:
        """Write which keys were used, in one transaction: no request waits for it."""
        with self._lock:
            used, self._used = self._used, {}
        if not used:
            return
        try:
            with self._database.transaction() as tx:
                for key_id, used_at in sorted(used.items()):
                    keys.record_use(tx, key_id, used_at)
        except BaseException:
            with self._lock:
                self._used = used | self._used
            raise

    def create_job(self) -> PeriodicJob:
        """The periodic job that writes which keys were used; while the database is away or full, it tries again."""
        return PeriodicJob("used keys", lambda _: self.record_uses(), RECORD_SECONDS)


def may_come_from(key: Key, address: str) -> bool:
    """Whether a key may be used from an address."""
    return not key.networks or is_within(address, key.networks)


def _accept_key(key: Key | None, address: str) -> Key | None:
    """The key if it may be used from the address."""
    if key is None or may_come_from(key, address):
        return key
    log.warning("key %s was used from %s, which is not in its networks", key.id, address)
    return None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
