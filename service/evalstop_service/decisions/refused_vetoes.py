"""Extends veto windows when a veto was refused or not stored, so that no stop is sent because of an overload."""

from __future__ import annotations

import logging
import threading
import time
from uuid import UUID

from evalstop_service.clock import Clock
from evalstop_service.store.database import Database
from evalstop_service.store.queue import queues, veto_windows

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""The pause before an extension that could not be written is retried."""


class RefusedVetoes:
    """`report` reports that a veto may have been refused; a thread retries until the windows are extended.

    The windows are those of the affected project, or of all projects if it is not known.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._reported: set[UUID | None] = set()

    def report(self, project_id: UUID | None) -> None:
        """Extend the windows of a project, or (None) of all, from any thread and without waiting."""
        with self._lock:
            self._reported.add(project_id)
            if self._thread is None:
                self._thread = threading.Thread(target=self._extend_windows, name="refused-vetoes", daemon=True)
                self._thread.start()

    def _extend_windows(self) -> None:
        while True:
            with self._lock:
                if not self._reported:
                    self._thread = None
                    return
                reported, self._reported = self._reported, set()
            try:
                with self._database.transaction() as tx:
                    now, _ = queues.read_clock(tx, self._clock())
                    projects = None if None in reported else {known for known in reported if known is not None}
                    count = veto_windows.extend_windows(tx, now, "a veto could not be accepted", project_ids=projects)
                if count:
                    log.warning("a veto could not be accepted: extended %d veto windows", count)
            except Exception:  # the database is unreachable, for the worker too
                log.exception("a veto could not be accepted, and the veto windows could not be extended yet")
                with self._lock:
                    self._reported |= reported
            time.sleep(PAUSE_SECONDS)
