"""The receiver's journal: the requested stops and the state of each, one file per decision.

A file is replaced atomically and is on disk before its state is acted upon, so that a restarted receiver continues
where it was and obeys no decision twice. Small files, not a database: the folder may be on a network disk.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from evalstop_client.errors import ConfigurationError, EventMalformed
from evalstop_client.receivers.stop.job_control import Job, StopRequest, parse_stop_request
from evalstop_client.receivers.stop.state_machine import Phase, Report, Stop

logger = logging.getLogger("evalstop_client.receivers")

RETENTION_SECONDS = 90 * 86_400.0
LOCK_SECONDS = 2.0  # a command that a killed receiver was about to start holds its lock until the command runs


@dataclass(frozen=True)
class JournalEntry:
    """A stop and its request."""

    request: StopRequest
    stop: Stop


class Journal:
    """All stops, by decision; with `folder` None they last only as long as the process."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._stops: dict[str, JournalEntry] = {}
        self._lock_file: IO[str] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_file = _lock_folder(folder)
            self._load_folder(folder)

    def close(self) -> None:
        """Release the folder's lock."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def begin_stop(self, request: StopRequest, at: float) -> JournalEntry | None:
        """Record a stop that starts now; None if the decision is already known.

        A stop that failed, or whose end could not be reported, starts again: the sender requests it again for a reason.
        So does a stop that parked its job, if the job must now be ended. A stop that was taken back never starts again.
        """
        with self._lock:
            known = self._stops.get(request.decision_id)
            if known is not None and not _may_start_again(known.stop, request):
                return None
            was_parked = known is not None and known.stop.parks and not request.parks
            entry = JournalEntry(request, Stop(started_at=at, parks=request.parks, was_parked=was_parked))
            self._store_entry(entry)
            return entry

    def record_stop(self, request: StopRequest, stop: Stop) -> None:
        with self._lock:
            self._store_entry(JournalEntry(request, stop))

    def record_resume(self, request: StopRequest, at: float) -> bool:
        """Record that a stop was taken back, known or not: its request may arrive later. False if it is in progress."""
        with self._lock:
            known = self._stops.get(request.decision_id) or JournalEntry(request, Stop(at, Phase.DONE))
            if known.stop.phase is not Phase.DONE:
                return False
            self._store_entry(JournalEntry(known.request, replace(known.stop, resumed_at=at)))
            return True

    @property
    def is_empty(self) -> bool:
        """Whether no job of this receiver was to be stopped: other receivers' events are recorded too."""
        with self._lock:
            return all(entry.stop.job is None for entry in self._stops.values())

    def find_entry(self, decision_id: str) -> JournalEntry | None:
        with self._lock:
            return self._stops.get(decision_id)

    def list_unfinished(self) -> list[JournalEntry]:
        """The unfinished stops, oldest first."""
        with self._lock:
            unfinished = [entry for entry in self._stops.values() if entry.stop.phase is not Phase.DONE]
        return sorted(unfinished, key=lambda entry: entry.stop.started_at)

    def list_parked(self) -> list[JournalEntry]:
        """The stops that have parked their jobs and were not taken back."""
        with self._lock:
            return [entry for entry in self._stops.values() if entry.stop.is_parked]

    def count_idle_return(self, decision_id: str) -> None:
        """Record that a parked job ran while nobody waited, and is set aside again."""
        with self._lock:
            entry = self._stops[decision_id]
            self._store_entry(replace(entry, stop=replace(entry.stop, idle_returns=entry.stop.idle_returns + 1)))

    def delete_finished(self, before: float) -> None:
        """Delete the entries of finished stops that started before this time."""
        with self._lock:
            for entry in list(self._stops.values()):
                if entry.stop.phase is Phase.DONE and entry.stop.started_at < before:
                    self._delete(entry.request.decision_id)

    def _store_entry(self, entry: JournalEntry) -> None:
        decision_id = entry.request.decision_id
        if not entry.stop.is_ours:  # other receivers' stops are not stored
            self._delete(decision_id)
            return
        if self.folder is not None:
            _write_durably(self.folder / f"{decision_id}.json", _to_document(entry))
        self._stops[decision_id] = entry

    def _delete(self, decision_id: str) -> None:
        self._stops.pop(decision_id, None)
        if self.folder is not None:
            (self.folder / f"{decision_id}.json").unlink(missing_ok=True)

    def _load_folder(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.json")):
            try:
                entry = _parse_document(json.loads(file.read_text()))
            except (OSError, ValueError, KeyError, TypeError, EventMalformed) as error:
                logger.error("%s cannot be read and is skipped: %s: %s", file, type(error).__name__, error)
            else:
                self._stops[entry.request.decision_id] = entry


def _may_start_again(stop: Stop, request: StopRequest) -> bool:
    if stop.phase is not Phase.DONE or stop.resumed_at is not None or stop.taken_back_at is not None:
        return False
    failed = stop.report is not None and stop.report.state == "failed"
    is_other = stop.parks and not request.parks
    return stop.is_ours and (failed or not stop.report_answered or is_other)


def _lock_folder(folder: Path) -> IO[str]:
    file, deadline = (folder / "lock").open("w"), time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            file.close()
            raise ConfigurationError(f"state {folder}: another receiver uses it; give each its own.") from None
        except OSError as error:  # a network disk without locking
            logger.warning("%s cannot be locked (%s): make sure that no second receiver uses it", folder, error)
        break
    return file


def _write_durably(file: Path, document: Mapping[str, Any]) -> None:
    temporary = file.with_suffix(".tmp")
    with temporary.open("w") as stream:
        json.dump(document, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the directory entry too, or a crash may restore the previous file
    finally:
        os.close(folder)


def _to_document(entry: JournalEntry) -> dict[str, Any]:
    request = entry.request
    return {"webhook_id": request.webhook_id, "event": request.event, "stop": asdict(entry.stop)}


def _parse_document(document: Mapping[str, Any]) -> JournalEntry:
    fields = dict(document["stop"])
    job, report = fields.pop("job"), fields.pop("report")
    stop = Stop(**{**fields, "phase": Phase(fields["phase"])})
    stop = replace(stop, job=Job(**job) if job else None, report=Report(**report) if report else None)
    return JournalEntry(parse_stop_request(document["webhook_id"], document["event"]), stop)
