"""Live runs: what this process remembers of the runs it took in last, so that more of the same needs no reading.

A live run is a cache. It is good as long as its stamp is that of the run's row, which the caller has locked; it is
taken out while news are worked in and put back after the commit, so that whatever fails on the way leaves no trace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from uuid import UUID

from evalstop_detectors import (
    BestSoFar,
    Chooser,
    MonitorState,
    Observation,
    Policy,
    Score,
    SmoothedMaximum,
    Verdict,
    is_late,
)

from evalstop_service.errors import Behind
from evalstop_service.projects import policies
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run, Stamp

CHOOSER: Chooser = SmoothedMaximum()

KEEP_EVERY = 2048
"""Observations after which a monitor's state is written down anew: as many are replayed at most to bring one back."""

SHARED_FOR = 16
"""Posts in a row that find a run as it is remembered here before it is believed to be this process's alone again."""

LATE_WEIGHT = 128
"""A late point makes a kept state useless to other processes, and counts for so many towards the next."""


class Trail:
    """Earlier states of a monitor, from which late observations can be taken in without replaying the whole run.

    Of each gap the last two states are kept that were left where its multiples were passed: one of them lies at least
    that many observations back, and not more than twice as many.
    """

    __slots__ = ("_states",)

    GAPS = (16, 128)

    def __init__(self) -> None:
        self._states: list[list[tuple[int, MonitorState]]] = [[] for _ in self.GAPS]  # by ascending count

    def leave(self, count: int, state: MonitorState) -> None:
        """Remember the state after `count` observations."""
        for gap, states in zip(self.GAPS, self._states, strict=True):
            if not states or count // gap > states[-1][0] // gap:
                states.append((count, state))
                del states[:-2]

    def back_to(self, observation: Observation) -> tuple[int, MonitorState] | None:
        """The last remembered state that this observation is not late for; all later ones are forgotten."""
        for states in self._states:
            while states and is_late(states[-1][1], observation):
                states.pop()
        return max((states[-1] for states in self._states if states), key=lambda item: item[0], default=None)

    def forget(self) -> None:
        """Remember nothing: the past is another."""
        for states in self._states:
            states.clear()


class Scores:
    """A run's gold scores and checkpoints as far as they are needed to keep the pointer to the best one."""

    __slots__ = ("best", "last_step", "uris")

    def __init__(self) -> None:
        self.best = BestSoFar(CHOOSER)
        self.last_step = -1
        self.uris: dict[int, str] = {}

    def add(self, scores: Iterable[Score]) -> bool:
        """Take in scores by ascending step; False, and nothing is worth keeping, when one comes late."""
        for score in scores:
            if score.step <= self.last_step:
                return False
            self.last_step = score.step
            self.best.add(score)
        return True

    def saved(self, step: int, uri: str) -> None:
        """Take in a checkpoint; again is harmless."""
        if step not in self.uris:
            self.uris[step] = uri
            self.best.saved(step)


@dataclass(slots=True)
class LiveRun:
    """A run as it stands, with what its next news need.

    `run`: its row. `last_steps`: the highest live step of each metric: a point past it is new, whatever else is on
    record. `decided`: this attempt has a decision on record. `scores`: None when they have to be read again. `told`:
    the verdict that the row says. `reached`: verdicts come to since the row was written. `count`: observations that
    the monitor took in since it was brought back; `unkept`: of those, how many its kept state does not hold. `shared`:
    another process moved it on lately and may do so again: for so many more posts it is locked before it is believed.
    `let_run`: the decision on this attempt if it is a shadow's or held out, which nothing changes but a person, and
    then the run's row is changed, too; None when it has to be looked up.
    """

    run: Run
    policy: Policy
    watch: WatchedMetrics
    monitor: MonitorState
    last_steps: dict[str, int]
    decided: bool
    scores: Scores | None = None
    told: Verdict | None = None
    reached: list[Verdict] = field(default_factory=list)
    trail: Trail = field(default_factory=Trail)
    count: int = 0
    unkept: int = 0
    shared: int = 0
    let_run: Decision | None = None

    @property
    def stamp(self) -> Stamp:
        return self.run.version, self.run.updated_at


class LiveRuns:
    """At most `most` live runs, those that were taken in last; safe to share between threads."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._runs: OrderedDict[UUID, LiveRun] = OrderedDict()
        self._policies: dict[UUID, Policy] = {}

    def take_out(self, run_ids: Iterable[UUID]) -> dict[UUID, LiveRun]:
        """The live runs among these, no longer held here."""
        with self._lock:
            return {run_id: live for run_id in run_ids if (live := self._runs.pop(run_id, None)) is not None}

    def take_out_own(self, run_ids: Iterable[UUID]) -> dict[UUID, LiveRun]:
        """The live runs among these, no longer held here, but for those that another process shares in."""
        with self._lock:
            own = (run_id for run_id in run_ids if (live := self._runs.get(run_id)) is not None and not live.shared)
            return {run_id: self._runs.pop(run_id) for run_id in own}

    def put_back(self, runs: Collection[LiveRun]) -> None:
        """Remember runs whose news were committed."""
        with self._lock:
            for live in runs:
                self._runs[live.run.id] = live
                self._runs.move_to_end(live.run.id)
            while len(self._runs) > self._most:
                self._runs.popitem(last=False)

    def policy(self, tx: Transaction, policy_id: UUID) -> Policy:
        """The policy with this id, ready to judge; one never changes, so it is read once. Raises Behind."""
        found = self._policies.get(policy_id)
        if found is None:
            found = policies.read_policy(tx, policy_id)
            if found is None:
                raise Behind
            self._policies[policy_id] = found
        return found

    def __len__(self) -> int:
        return len(self._runs)
