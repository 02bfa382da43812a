"""One transaction's work: what is to be written, gathered, so that a hundred runs cost as many statements as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from evalstop_detectors import state_to_json

from evalstop_service.ingest.run_cache import KEEP_EVERY, LiveRun
from evalstop_service.rules.decision_lifecycle import LET_RUN
from evalstop_service.store import decisions, monitor_states, observations, runs
from evalstop_service.store.compare_and_save import Stroke
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import NewObservation, Point


class NeedsTransaction(Exception):
    """What is remembered of a run does not suffice for this news of it; nothing of it has been worked in."""


class Moved(Exception):
    """A run is no longer as it was remembered: another process moved it on."""


class Work:
    """Rows on their way to the database.

    `held`: the runs. Given `tx`, they are locked in it, and `write` writes. Without, they are what this process
    remembers, taken at its word: whoever is about to need more says so first (`needs_transaction`), what is to follow
    from the news waits (`then`), and in the end all is saved at one stroke, or `go_on_in` a transaction after all.
    Either way the stamps of the runs are compared while they are locked.
    """

    def __init__(self, now: datetime, held: Mapping[UUID, LiveRun], tx: Transaction | None = None) -> None:
        self.now = now
        self.detector_seconds = 0.0
        self._tx = tx
        self._stamps = {run_id: live.stamp for run_id, live in held.items()}
        self._decided = [run_id for run_id, live in held.items() if live.decided]
        self._decisions: dict[UUID, Decision] | None = None
        self._points: list[NewObservation] = []
        self._late: list[NewObservation] = []
        self._changed: dict[int, LiveRun] = {}
        self._following: dict[UUID, list[Callable[[], None]]] = {}

    @property
    def tx(self) -> Transaction:
        """The transaction in which the runs are locked. Whoever has to read what is on its way calls `write` first."""
        assert self._tx is not None, "what needs a transaction says so before it changes anything"
        return self._tx

    def needs_transaction(self) -> None:
        """Raise NeedsTransaction where there is none."""
        if self._tx is None:
            raise NeedsTransaction

    def then(self, live: LiveRun, action: Callable[[], None]) -> None:
        """Do what follows from the news of a run and takes a transaction: now, or when there is one."""
        if self._tx is None:
            self._following.setdefault(live.run.id, []).append(action)
        else:
            action()

    @property
    def unfinished(self) -> Collection[UUID]:
        """The runs of which something waits for a transaction."""
        return self._following.keys()

    def let_go(self, run_id: UUID) -> None:
        """Nothing was worked in of this run, and none of it is to be compared."""
        del self._stamps[run_id]

    def store(self, live: LiveRun, points: Sequence[Point], late: int) -> None:
        """Points whose identities have no live observation are to be stored; the last `late` belong among others."""
        run = live.run
        self._points += [NewObservation(run.id, run.attempt, point) for point in points]
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
            observations.add_observations(self.tx, self._points, self.now, self._late)
            self._points, self._late = [], []
        if self._changed:
            changed = list(self._changed.values())
            self._changed = {}
            runs.save_runs(self.tx, [live.run for live in changed])
            self._keep([live for live in changed if live.unkept >= KEEP_EVERY])

    def stroke(self) -> Stroke:
        """All that was gathered, to be saved by one statement."""
        moves = [(self._stamps[live.run.id], live.run) for live in self._changed.values()]
        return Stroke(moves, self._points, self.now)

    def go_on_in(self, tx: Transaction) -> None:
        """Lock the runs, do what waits, and write; raises Moved if one is not as it was remembered."""
        if runs.lock_runs(tx, list(self._stamps)) != self._stamps:
            raise Moved
        self._tx = tx
        for actions in self._following.values():
            for action in actions:
                action()
        self.write()

    def _on_record(self) -> dict[UUID, Decision]:
        if self._decisions is None:
            self._decisions = decisions.load_decisions(self.tx, self._decided) if self._decided else {}
        return self._decisions

    def _keep(self, due: list[LiveRun]) -> None:
        if due:
            states = [
                (live.run.id, live.run.version, state_to_json(live.policy, live.monitor).decode()) for live in due
            ]
            monitor_states.save_states(self.tx, states, self.now)
            for live in due:
                live.unkept = 0
