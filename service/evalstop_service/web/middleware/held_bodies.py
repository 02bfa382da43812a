"""Limits the memory for arriving bodies: a share for each sender, and reserved pools that others cannot fill.

| pool | for | in all | per sender |
|---|---|---|---|
| decisions | short bodies of operators and receivers: vetoes, pauses, reports | 8 MiB | 1 MiB |
| sign-in | the sign-in form | 4 MiB | 256 KiB per address |
| short | bodies up to 64 KiB of any key or session | 16 MiB | 4 MiB |
| long | other bodies of a key or session | 64 MiB | 16 MiB, or one body if the limit is higher |
| strangers | bodies without a valid key or session | 8 MiB | 512 KiB per address |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from uuid import UUID

from evalstop_service.web.decision_paths import SIGN_IN, is_decision_path

SHORT_BYTES = 64 * 1024
"""Largest short body, and the most that is held without a valid key or session."""

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Sender:
    """The sender of a request, by its headers. `name`: a key, a session or an address; `known`: a valid key or
    session; `operates`: may veto in `project_id`; `reports`: may report on stops there."""

    name: str
    known: bool = False
    operates: bool = False
    reports: bool = False
    project_id: UUID | None = None


class Room(Enum):
    """Whether a pool has room for more bytes."""

    FREE = "free"
    SHARE_USED = "the sender has used its share"
    ALL_USED = "all senders together have used the pool"


class BodyPool:
    """Counts the bytes that are held: `total_bytes` in all, `share_bytes` for each sender."""

    def __init__(self, total_bytes: int, share_bytes: int) -> None:
        self._total_bytes, self._share_bytes = total_bytes, share_bytes
        self._bytes_by_sender: Counter[str] = Counter()
        self._held_bytes = 0

    def hold(self, sender: str, size: int) -> Room:
        """Add bytes to the count if there is room for them."""
        if self._bytes_by_sender[sender] + size > self._share_bytes:
            return Room.SHARE_USED
        if self._held_bytes + size > self._total_bytes:
            return Room.ALL_USED
        self._held_bytes += size
        self._bytes_by_sender[sender] += size
        return Room.FREE

    def release(self, sender: str, size: int) -> None:
        """Subtract bytes from the count."""
        self._held_bytes -= size
        self._bytes_by_sender[sender] -= size
        if not self._bytes_by_sender[sender]:
            del self._bytes_by_sender[sender]


class HeldBodies:
    """The pools of one process; `max_bytes`: the limit of a body."""

    def __init__(self, max_bytes: int) -> None:
        self.long = BodyPool(max(64 * _MEBIBYTE, max_bytes), max(16 * _MEBIBYTE, max_bytes))
        self._decisions = BodyPool(8 * _MEBIBYTE, _MEBIBYTE)
        self._sign_in = BodyPool(4 * _MEBIBYTE, _MEBIBYTE // 4)
        self._short = BodyPool(16 * _MEBIBYTE, 4 * _MEBIBYTE)
        self._strangers = BodyPool(8 * _MEBIBYTE, _MEBIBYTE // 2)

    def select_pool(self, sender: Sender, path: str, declared_bytes: int | None) -> BodyPool:
        """The pool for a body; `declared_bytes`: its declared length, or None."""
        if path == SIGN_IN:
            return self._sign_in
        if not sender.known:
            return self._strangers
        if declared_bytes is None or declared_bytes > SHORT_BYTES:
            return self.long
        return self._decisions if sender.reports and is_decision_path(path) else self._short
