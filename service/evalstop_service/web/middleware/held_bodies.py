"""How much of the bodies that are arriving is held: shares for each sender, and reserves that others cannot fill.

| pool | for | in all | a sender |
|---|---|---|---|
| decisions | short bodies of operators and receivers: vetoes, pauses, reports | 8 MiB | 1 MiB |
| sign-in | the sign-in form | 4 MiB | 256 KiB an address |
| short | bodies up to 64 KiB of any key or session | 16 MiB | 4 MiB |
| long | other bodies of a key or session | 64 MiB | 16 MiB, or one body if that may be longer |
| strangers | bodies without a valid key or session | 8 MiB | 512 KiB an address |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from uuid import UUID

from evalstop_service.web.decision_paths import SIGN_IN, is_decision_path

SHORT_BYTES = 64 * 1024
"""Of a short body, and the most that is held without a valid key or session."""

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Sender:
    """Who sends a request, as its head shows. `name` is a key, a session or an address; `known`: a valid key or
    session; `operates`: it may veto in `project_id`; `reports`: it may say there what became of a stop."""

    name: str
    known: bool = False
    operates: bool = False
    reports: bool = False
    project_id: UUID | None = None


class Room(Enum):
    """What a pool says to more bytes."""

    FREE = "free"
    SHARE_USED = "the sender holds its share"
    ALL_USED = "all senders together hold what there is"


class BodyPool:
    """Counts the bytes that are held: `total_bytes` in all, `share_bytes` for each sender."""

    def __init__(self, total_bytes: int, share_bytes: int) -> None:
        self._total_bytes, self._share_bytes = total_bytes, share_bytes
        self._held: Counter[str] = Counter()
        self._held_bytes = 0

    def hold(self, sender: str, size: int) -> Room:
        """Count so many more bytes if there is room for them."""
        if self._held[sender] + size > self._share_bytes:
            return Room.SHARE_USED
        if self._held_bytes + size > self._total_bytes:
            return Room.ALL_USED
        self._held_bytes += size
        self._held[sender] += size
        return Room.FREE

    def release(self, sender: str, size: int) -> None:
        """Count so many bytes less."""
        self._held_bytes -= size
        self._held[sender] -= size
        if not self._held[sender]:
            del self._held[sender]


class HeldBodies:
    """The pools of one process; `max_bytes`: of a body."""

    def __init__(self, max_bytes: int) -> None:
        self.long = BodyPool(max(64 * _MEBIBYTE, max_bytes), max(16 * _MEBIBYTE, max_bytes))
        self._decisions = BodyPool(8 * _MEBIBYTE, _MEBIBYTE)
        self._sign_in = BodyPool(4 * _MEBIBYTE, _MEBIBYTE // 4)
        self._short = BodyPool(16 * _MEBIBYTE, 4 * _MEBIBYTE)
        self._strangers = BodyPool(8 * _MEBIBYTE, _MEBIBYTE // 2)

    def select_pool(self, sender: Sender, path: str, declared_bytes: int | None) -> BodyPool:
        """The pool of a body whose length is declared, or (None) is not."""
        if path == SIGN_IN:
            return self._sign_in
        if not sender.known:
            return self._strangers
        if declared_bytes is None or declared_bytes > SHORT_BYTES:
            return self.long
        return self._decisions if sender.reports and is_decision_path(path) else self._short
