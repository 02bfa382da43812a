"""The state of a run in memory: its row, and what its next message needs. Immutable: a message yields a new state."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import evalstop_detectors
import msgspec
from evalstop_detectors import (
    CombinedState,
    MonitorState,
    Observation,
    Policy,
    Score,
    Verdict,
    is_late,
)
from msgspec.structs import replace

from evalstop_service.rules.decision_lifecycle import OBSERVED
from evalstop_service.rules.eval_changes import EvalChange
from evalstop_service.runs.metric_roles import RoleAssignment
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.decisions import Decision
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.store.runs import Run

_log = logging.getLogger(__name__)

CHOICE_FAILED = "the choice of the best checkpoint failed"

KEEP_EVERY = 2048
"""Observations after which a monitor's state is stored: at most as many are replayed to restore it."""


class Trail(msgspec.Struct, frozen=True):
    """Earlier states of a monitor, from which late observations are replayed instead of from the beginning.

    For each gap the last two states at multiples of it are kept: one of them is at least that many observations back,
    and not more than twice as many. Each is (count of observations, state).
    """

    near: tuple[tuple[int, MonitorState], ...] = ()
    far: tuple[tuple[int, MonitorState], ...] = ()

    def extended(self, count: int, state: MonitorState) -> Trail:
        """The trail with the state after `count` observations."""
        near = _extend_states(self.near, 16, count, state)
        # Whenever a multiple of 128 is passed, so is one of 16.
        return self if near is self.near else Trail(near, _extend_states(self.far, 128, count, state))

    def before(self, observation: Observation) -> Trail:
        """The trail without the states for which this observation is late."""
        return Trail(*(tuple(s for s in states if not is_late(s[1], observation)) for states in (self.near, self.far)))

    @property
    def last(self) -> tuple[int, MonitorState] | None:
        """The latest state and its count."""
        return max((states[-1] for states in (self.near, self.far) if states), key=lambda item: item[0], default=None)


def _extend_states(
    states: tuple[tuple[int, MonitorState], ...], gap: int, count: int, state: MonitorState
) -> tuple[tuple[int, MonitorState], ...]:
    return states if states and count // gap <= states[-1][0] // gap else (*states[-1:], (count, state))


class Scores:
    """The scores and checkpoints of a run, from which the best one is chosen.

    `count` counts what was added, so that a state recognizes scores
    that have advanced past it, for example by a message whose commit failed: see `RunState.usable_scores`.
    """

    __slots__ = ("all", "count", "last_step", "uris")

    def __init__(self, scores: Iterable[Score] = (), checkpoints: Iterable[Checkpoint] = ()) -> None:
        self.all = evalstop_detectors.Scores()
        self.last_step = -1
        self.uris: dict[int, str] = {}
        self.count = 0
        self.add_scores(scores)
        self.add_checkpoints(checkpoints)

    def add_scores(self, scores: Iterable[Score]) -> None:
        """Add scores by ascending step, all past the last one."""
        added = list(scores)
        if added:
            self.all = self.all.add_scores(added)
            self.last_step = added[-1].step
            self.count += len(added)

    def add_checkpoints(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Add checkpoints; known ones are skipped."""
        added = {item.step: item.uri for item in checkpoints if item.step not in self.uris}
        if added:
            self.uris |= added
            self.all = self.all.add_checkpoints(added)
            self.count += len(added)


class RunState(msgspec.Struct, frozen=True):
    """A run with everything its next message needs.

    `last_steps`: the highest live step of each metric: a later observation is new. `has_decision`: whether the current
    attempt has one; `final_decision`: that one, if it is in shadow or held out, so that only a person changes it and
    with it the run's version. `eval_request`: the paired evaluation awaiting its answer. `recorded`: the verdict in the
    run's row; None if the row was read. `unrecorded`: verdicts reached since the row was written. `combined`: for a run
    with several evals, the state of their combination; None: it has to be computed again. `count`: observations since
    the monitor was restored; `unkept`: those that its stored state lacks. `failure`: why the run is no longer judged;
    the detectors see nothing more until the monitor is replayed. `shared`: another process recently saved the run: for
    this many more messages its version is checked before use.
    """

    run: Run
    policy: Policy
    watch: WatchedMetrics
    monitor: MonitorState
    last_steps: dict[str, int]
    has_decision: bool = False
    final_decision: Decision | None = None
    eval_request: EvalRequest | None = None
    scores: Scores | None = None
    scores_count: int = 0
    combined: CombinedState | None = None
    recorded: Verdict | None = None
    unrecorded: tuple[Verdict, ...] = ()
    trail: Trail = Trail()
    count: int = 0
    unkept: int = 0
    failure: str | None = None
    shared: int = 0

    @property
    def usable_scores(self) -> Scores | None:
        """The scores, unless they have advanced past this state."""
        return self.scores if self.scores is not None and self.scores.count == self.scores_count else None

    @property
    def keeps_monitor(self) -> bool:
        """Whether the monitor is to be stored: the stored one lacks many observations, this one passed over none."""
        return self.unkept >= KEEP_EVERY and self.failure is None


def describe_failure(run: Run, what: str, error: Exception) -> str:
    """Why a run is no longer judged: for its page. The traceback goes to the log."""
    _log.error("%s, of run %s (%s)", what, run.id, run.name, exc_info=error)
    return f"{what}: {error!r:.200}"


def with_eval_changes(state: RunState, changes: tuple[EvalChange, ...]) -> RunState:
    """The state of a run with these changes of its eval's measurement."""
    if changes == state.run.eval_changes:
        return state
    run = replace(state.run, eval_changes=changes)
    return replace(state, run=run, watch=WatchedMetrics(run, state.policy))


def with_roles(state: RunState, roles: RoleAssignment, *, anew: bool = False) -> RunState:
    """The state with these roles; the run is judged again if its metrics or its policy change, or `anew`."""
    run = replace(state.run, metrics=roles.metrics, recognition=roles.recognition)
    policy = restrict_policy(state.policy, run)
    if roles.metrics != state.run.metrics or policy is not state.policy or anew:
        return replace(state, run=run, policy=policy, watch=WatchedMetrics(run, policy))
    return replace(state, run=run) if roles.recognition != state.run.recognition else state


def with_decision(state: RunState, decision: Decision | None) -> RunState:
    """The state with the decision on its attempt."""
    final = decision if decision is not None and decision.state in OBSERVED else None
    if decision is None or (state.has_decision and state.final_decision is final):
        return state
    return replace(state, has_decision=True, final_decision=final)
