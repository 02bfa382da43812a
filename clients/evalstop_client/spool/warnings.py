"""Says each kind of trouble once in the log, and counts the observations that it cost."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("evalstop_client")


class WarningLog:
    """One run's memory of what it has already complained about."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many points, checkpoints and other calls were given up for good."""
        return self._dropped

    def warn_once(self, kind: str, message: str, *args: object) -> None:
        """Warn, unless this kind was said before."""
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        logger.warning("evalstop: " + message, *args)

    def count_dropped(self, kind: str, count: int, message: str, *args: object) -> None:
        """Count `count` things as lost, and warn unless this kind was said before."""
        with self._lock:
            self._dropped += count
        self.warn_once(kind, message + " (said once; run.dropped counts them)", *args)

    def reset(self, kind: str) -> None:
        """Forget that this kind was said: the trouble has passed, and would be news again."""
        with self._lock:
            self._said.discard(kind)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.Lock()
