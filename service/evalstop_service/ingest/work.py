"""One transaction's work: what is to be written, gathered, so that a hundred runs cost as many statements as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from evalstop_detectors import state_to_json

from evalstop_service.ingest.live import KEEP_EVERY, LiveRun
from evalstop_service.store import decisions, monitors, observations, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import New, Point


class Work:
    """Rows on their way to the database. Whoever has to read what may still be on its way calls `write` first."""

    def __init__(self, tx: Transaction, now: datetime, held: Iterable[LiveRun]) -> None:
        self.tx = tx
        self.now = now
        self.detector_seconds = 0.0
        decided = [live.run.id for live in held if live.decided]
        self._decisions = decisions.of_runs(tx, decided) if decided else {}
        self._points: list[New] = []
        self._late: list[New] = []
        self._changed: dict[int, LiveRun] = {}

    def store(self, live: LiveRun, points: Sequence[Point], late: int) -> None:
        """Points whose identities have no live observation are to be stored; the last `late` belong among others."""
        run = live.run
        self._points += [New(run.id, run.attempt, point) for point in points]
        if late:
            self._late += self._points[-late:]

    def changed(self, live: LiveRun) -> None:
        """The run's row is to be written."""
        self._changed[id(live)] = live

    def decision(self, live: LiveRun) -> Decision | None:
        """The decision on the run's present attempt."""
        found = self._decisions.get(live.run.id)
        return found if found is not None and found.attempt == live.run.attempt else None

    def decided(self, live: LiveRun, decision: Decision) -> None:
        """A decision was made just now."""
        live.decided = True
        self._decisions[live.run.id] = decision

    def write(self) -> None:
        """Write all that was gathered."""
        if self._points:
            observations.add_many(self.tx, self._points, self.now, self._late)
            self._points, self._late = [], []
        if self._changed:
            changed = list(self._changed.values())
            self._changed = {}
            runs.save_many(self.tx, [live.run for live in changed])
            self._keep([live for live in changed if live.unkept >= KEEP_EVERY])

    def _keep(self, due: list[LiveRun]) -> None:
        if due:
            states = [
                (live.run.id, live.run.version, state_to_json(live.policy, live.monitor).decode()) for live in due
            ]
            monitors.keep(self.tx, states, self.now)
            for live in due:
                live.unkept = 0
