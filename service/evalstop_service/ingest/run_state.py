"""The state of a run in memory, and how its monitor moves. Immutable: a message yields a new state.

An exception in a detector must not keep the run's observations from being stored. It ends the judgment of the run, at
the observation that caused it, until the run is judged anew by an edit or by a process that does not have it in memory.
So does one in the combination of evals or in the choice of the best checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from evalstop_detectors import (
    CombinedState,
    EvalRequest,
    MonitorState,
    Observation,
    Policy,
    Scores,
    Verdict,
    advance,
    find_request,
)
from msgspec.structs import replace

from evalstop_service.domain.decision_lifecycle import OBSERVED
from evalstop_service.domain.run import EvalChange
from evalstop_service.runs.metric_roles import RoleAssignment
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run

_log = logging.getLogger(__name__)

SAVE_EVERY = 2048
"""Observations after which a run's monitor is stored: at most as many are replayed to restore it."""

SLICE = 16
"""Observations in a thread after which other threads run."""

PAUSE_SECONDS = 0.0002
"""The shortest pause after a slice: longer than a thread takes to wake up."""

_STATE_BYTES, _METRIC_BYTES, _EVAL_BYTES, _CHECKPOINT_BYTES = 56_000, 250, 32, 258


class RunState(msgspec.Struct, frozen=True):
    """A run with everything its next observations need.

    `watch`: its metrics and policy. `last_steps`: the highest live step of each metric: a later observation is new.
    `scores`: its finite evals and its checkpoints. `combined`: for a run with several evals, the state of their
    combination; None: it has to be computed from the rows. `decision`: on the current attempt, as last read. `unsaved`:
    observations that the stored monitor lacks. `failure`: why the run is no longer judged; the detectors see nothing
    more.
    """

    run: Run
    watch: WatchedMetrics
    monitor: MonitorState
    last_steps: dict[str, int]
    scores: Scores = Scores()
    combined: CombinedState | None = None
    decision: Decision | None = None
    unsaved: int = 0
    failure: str | None = None

    @property
    def policy(self) -> Policy:
        """The policy as it judges this run."""
        return self.watch.policy

    @property
    def requested_eval(self) -> EvalRequest | None:
        """The paired evaluation that the policy asks for."""
        return find_request(self.policy, self.monitor)

    @property
    def agrees_with_row(self) -> bool:
        """Whether the row has the result of the run's observations. Another policy or release may give another result,
        and so may a process whose detectors do not fail."""
        run = self.run
        recorded: str = run.verdict.verdict
        return self.monitor.verdict.verdict == recorded and self.failure == run.detector_failure

    @property
    def keeps_monitor(self) -> bool:
        """Whether the monitor is to be stored: the stored one lacks many observations, this one passed over none."""
        return self.unsaved >= SAVE_EVERY and self.failure is None

    @property
    def awaits_decision(self) -> bool:
        """Whether the decision may have changed since it was read. In shadow or held out only a person changes it, and
        with it the run's version."""
        return self.decision is not None and self.decision.state not in OBSERVED

    @property
    def size_bytes(self) -> int:
        """About how much memory the state takes."""
        of_scores = _EVAL_BYTES * len(self.scores.steps) + _CHECKPOINT_BYTES * len(self.scores.addresses)
        return _STATE_BYTES + _METRIC_BYTES * len(self.last_steps) + of_scores


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


def with_roles(state: RunState, roles: RoleAssignment) -> RunState:
    """The state with these roles; `watch` stays the same unless they change how the run is judged."""
    run = replace(state.run, metrics=roles.metrics, recognition=roles.recognition)
    policy = restrict_policy(state.policy, run)
    if roles.metrics == state.run.metrics and policy is state.policy:
        return replace(state, run=run) if roles.recognition != state.run.recognition else state
    return replace(state, run=run, watch=WatchedMetrics(run, policy))


def move_monitor(
    state: RunState, observations: Sequence[Observation], pauses: bool = True
) -> tuple[RunState, list[Verdict]]:
    """The state after its monitor has seen these observations, which follow its last; and the verdicts at which its
    call changed. `pauses`: whether others get a turn meanwhile.

    If a detector fails, the monitor is as before the observation at which it did, and passes over the others.
    """
    monitor, failure = state.monitor, state.failure
    if not observations:
        return state, []
    if failure is None:
        try:
            monitor, verdicts = advance(
                state.policy, monitor, _pause_between_slices(observations) if pauses else observations
            )
        except Exception:
            monitor, verdicts, failure = _advance_until_failure(state, observations)
    else:
        verdicts = [monitor.verdict]
    changed = len(verdicts) > 1 or monitor.verdict.verdict is not state.monitor.verdict.verdict
    if failure is not None:
        monitor = replace(monitor, last=observations[-1].order)
    unsaved = state.unsaved + len(observations)
    return replace(state, monitor=monitor, unsaved=unsaved, failure=failure), verdicts if changed else []


def _advance_until_failure(
    state: RunState, observations: Sequence[Observation]
) -> tuple[MonitorState, list[Verdict], str | None]:
    """Like `advance`, one observation at a time, so that a failure has the same effect however they arrive."""
    monitor, verdicts = state.monitor, list[Verdict]()
    for observation in observations:
        call = monitor.verdict.verdict
        try:
            monitor, reached = advance(state.policy, monitor, (observation,))
        except Exception as error:
            failure = describe_failure(state.run, f"a detector failed at step {observation.step}", error)
            return monitor, [*verdicts, monitor.verdict], failure
        if reached[-1].verdict is not call:
            verdicts.append(reached[-1])
    return monitor, [*verdicts, monitor.verdict], None


def observations_past(monitor: MonitorState, observations: list[Observation]) -> list[Observation]:
    """The observations that the monitor has not seen yet."""
    last = monitor.last
    return observations if last is None else [item for item in observations if item.order > last]


def _pause_between_slices(observations: Iterable[Observation]) -> Iterator[Observation]:
    """The observations, with a pause after each slice for as long as it took: for threads beside the event loop.

    Late observations and long batches are less urgent than what others wait for, who get at least half of the time.
    numpy releases the interpreter's lock for microseconds several times in each step. Each release wakes the threads
    that wait for the lock, but too late, and their switch interval begins again: during a long replay or batch the
    event loop could wait for 0.1 s.
    """
    began_at = time.monotonic()
    for number, observation in enumerate(observations):
        if number and number % SLICE == 0:
            time.sleep(max(PAUSE_SECONDS, time.monotonic() - began_at))
            began_at = time.monotonic()
        yield observation
