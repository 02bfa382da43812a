"""Logs each kind of problem once, and counts lost observations."""

from __future__ import annotations

import logging
import threading
from collections import Counter

logger = logging.getLogger("evalstop_client")


class WarningLog:
    """The problems that one run has already logged."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler that logs may interrupt its holder
        self._logged: set[str] = set()
        self._due: Counter[str] = Counter()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many observations, checkpoints and other calls were lost."""
        return self._dropped

    def warn_once(self, kind: str, message: str, *args: object) -> None:
        """Log a warning, unless one of this kind was logged before."""
        self._log_once(logging.WARNING, kind, message, *args)

    def warn_late(self, times: int, kind: str, message: str, *args: object) -> None:
        """Log a warning once, when it is due for the so-manyth time."""
        with self._lock:
            self._due[kind] += 1
        if self._due[kind] >= times:
            self.warn_once(kind, message, *args)

    def say_error_once(self, kind: str, message: str, *args: object) -> None:
        """The same at level ERROR, for problems because of which the run is not watched."""
        self._log_once(logging.ERROR, kind, message, *args)

    def count_dropped(self, kind: str, count: int, message: str, *args: object) -> None:
        """Count `count` items as lost, and warn once for each kind."""
        with self._lock:
            self._dropped += count
        self.warn_once(kind, message + " (logged once; run.dropped counts them)", *args)

    def reset(self, kind: str) -> None:
        """Allow another warning of this kind, since the problem has passed."""
        with self._lock:
            self._logged.discard(kind)

    def _log_once(self, level: int, kind: str, message: str, *args: object) -> None:
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        logger.log(level, "evalstop: " + message, *args)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.RLock()
