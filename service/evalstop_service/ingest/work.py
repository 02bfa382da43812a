"""One transaction's work: what is to be written, gathered, so that a hundred runs cost as many statements as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from types import TracebackType
from typing import Self
from uuid import UUID

from evalstop_detectors import state_to_json

from evalstop_service.ingest.live import KEEP_EVERY, LiveRun
from evalstop_service.lifecycle import LET_RUN
from evalstop_service.store import decisions, monitors, observations, runs
from evalstop_service.store.compare_and_save import compare_and_save
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import New, Point


class Moved(Exception):
    """A run is no longer as it was remembered: another process moved it on."""


class Work:
    """Rows on their way to the database; `with Work(...) as work` commits them, or leaves no trace when it raises.

    `held`: the runs. Given `tx`, they are locked in it. Without, they are what this process remembers, and taken at
    its word: a transaction begins when somebody asks for it, or never, when all can be saved at one stroke in the end.
    Either way their stamps are compared while they are locked, and a run that has moved on raises Moved.
    Whoever has to read what may still be on its way calls `write` first.
    """

    def __init__(
        self, database: Database, now: datetime, held: Mapping[UUID, LiveRun], tx: Transaction | None = None
    ) -> None:
        self.now = now
        self.detector_seconds = 0.0
        self._database, self._tx = database, tx
        self._ends = ExitStack()
        self._stamps = {run_id: live.stamp for run_id, live in held.items()}
        self._decided = [run_id for run_id, live in held.items() if live.decided]
        self._decisions: dict[UUID, Decision] | None = None
        self._points: list[New] = []
        self._late: list[New] = []
        self._changed: dict[int, LiveRun] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, traceback)

    @property
    def tx(self) -> Transaction:
        """The transaction in which the runs are locked."""
        return self._tx if self._tx is not None else self._begin()

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
        if not live.decided or live.let_run is not None:
            return live.let_run
        found = self._on_record().get(live.run.id)
        if found is None or found.attempt != live.run.attempt:
            return None
        if found.state in LET_RUN:
            live.let_run = found
        return found

    def decided(self, live: LiveRun, decision: Decision) -> None:
        """A decision was made just now."""
        self._on_record()[live.run.id] = decision
        live.decided = True

    def write(self) -> None:
        """Write all that was gathered."""
        if self._points:
            observations.add_many(self.tx, self._points, self.now, self._late)
            self._points, self._late = [], []
        if self._changed:
            changed = list(self._changed.values())
            self._changed = {}
            runs.save_many(self.tx, [live.run for live in changed])
            self._keep(_due(changed))

    def finish(self) -> None:
        """Write what is left, at one stroke where that will do."""
        changed = list(self._changed.values())
        few = self._tx is None and not self._late and len(self._points) <= observations.FEW
        if not few or not changed or _due(changed):
            self.write()
            if self._tx is None:  # there was nothing to write: what is answered has to be true all the same
                self._begin()
            return
        rows = [live.run for live in changed]
        with self._database.statement() as statement:
            if not compare_and_save(statement, self._stamps, rows, self._points, self.now):
                raise Moved

    def _begin(self) -> Transaction:
        self._tx = self._ends.enter_context(self._database.transaction())
        if runs.lock_many(self._tx, list(self._stamps)) != self._stamps:
            raise Moved
        return self._tx

    def _on_record(self) -> dict[UUID, Decision]:
        if self._decisions is None:
            self._decisions = decisions.of_runs(self.tx, self._decided) if self._decided else {}
        return self._decisions

    def _keep(self, due: list[LiveRun]) -> None:
        if due:
            states = [
                (live.run.id, live.run.version, state_to_json(live.policy, live.monitor).decode()) for live in due
            ]
            monitors.keep(self.tx, states, self.now)
            for live in due:
                live.unkept = 0


def _due(changed: Sequence[LiveRun]) -> list[LiveRun]:
    """Those whose monitor's state is to be written down anew."""
    return [live for live in changed if live.unkept >= KEEP_EVERY]
