"""Moves a run's monitor: forward by new observations, or back and through its past again.

An exception in a detector must not keep the run's observations from being stored. It ends the judgment of the run, at
the observation that caused it, until the monitor is replayed: for a late observation, for other roles, in a new
attempt, or by a process that does not have it in memory. So does one in the combination of evals or in the choice of
the best checkpoint, which are attempted again with the next eval. The run stays marked until a choice succeeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from evalstop_detectors import MonitorState, Observation, Policy, Verdict, advance, advance_parts, start, step
from msgspec.structs import replace

from evalstop_service.ingest.run_state import RunState, Trail, describe_failure
from evalstop_service.store.observations import PostedObservation

Advance = Callable[[Policy, MonitorState, Sequence[Observation]], tuple[MonitorState, list[Verdict]]]
"""`advance`, or the same with pauses."""

LATE_WEIGHT = 128
"""The weight of a late observation towards storing the monitor: it makes a stored one useless to other processes."""

SLICE = 16
"""Observations in a thread after which other threads run."""

PAUSE_SECONDS = 0.0002
"""The shortest pause after a slice: longer than a thread takes to wake up."""


def rewind_monitor(state: RunState, late: Observation | None) -> RunState:
    """The state with its monitor as before a late observation, if still in memory, or at the beginning."""
    trail = state.trail.before(late) if late is not None else Trail()
    count, monitor = trail.last or (0, start(state.policy))
    return replace(state, monitor=monitor, count=count, trail=trail, failure=None)


def replay_monitor(
    state: RunState, stored: Sequence[PostedObservation], fresh: Sequence[PostedObservation]
) -> RunState:
    """The state after its rewound monitor has seen all stored and new observations."""
    observations = observations_past(state.monitor, state.watch.observations([*stored, *fresh]))
    state, _ = move_monitor(state, observations, _advance_in_slices)
    return replace(state, unrecorded=(*state.unrecorded, state.monitor.verdict), unkept=state.unkept + LATE_WEIGHT)


def move_monitor(
    state: RunState, observations: Sequence[Observation], advance_by: Advance
) -> tuple[RunState, list[Verdict]]:
    """The state after its monitor has seen these observations, and the verdicts of `advance_by`.

    If a detector fails, the monitor is as before the observation at which it did, and passes over the others.
    """
    monitor, failure = state.monitor, state.failure
    if failure is None:
        try:
            monitor, verdicts = advance_by(state.policy, monitor, observations)
        except Exception:
            monitor, verdicts, failure = _advance_until_failure(state, observations)
    else:
        verdicts = [monitor.verdict]
    count = state.count + len(observations)
    if failure is not None:
        passed_over = replace(monitor, last=observations[-1].order) if observations else monitor
        return replace(state, monitor=passed_over, count=count, failure=failure), verdicts
    trail, unkept = state.trail.extended(count, monitor), state.unkept + len(observations)
    return replace(state, monitor=monitor, count=count, unkept=unkept, trail=trail), verdicts


def _advance_until_failure(
    state: RunState, observations: Sequence[Observation]
) -> tuple[MonitorState, list[Verdict], str | None]:
    """Like `advance`, one observation at a time, so that a failure has the same effect however they arrive."""
    monitor, verdicts = state.monitor, list[Verdict]()
    for observation in observations:
        call = monitor.verdict.verdict
        try:
            monitor, verdict = step(state.policy, monitor, observation)
        except Exception as error:
            failure = describe_failure(state.run, f"a detector failed at step {observation.step}", error)
            return monitor, [*verdicts, monitor.verdict], failure
        if verdict.verdict is not call:
            verdicts.append(verdict)
    return monitor, [*verdicts, monitor.verdict], None


def _advance_in_slices(
    policy: Policy, monitor: MonitorState, observations: Sequence[Observation]
) -> tuple[MonitorState, list[Verdict]]:
    """Like `advance`; outside the event loop's thread, pauses after each slice for as long as the slice took.

    Late observations and long batches are less urgent than what others wait for, who get at least half of the time.
    numpy releases the interpreter's lock for microseconds several times in each step. Each release wakes the threads
    that wait for the lock, too late, and their wait, after which the interpreter would hand it over, begins anew: in
    the middle of a long replay or batch the event loop could wait for 0.1 s.
    """
    if len(observations) <= SLICE or _runs_event_loop():
        return advance(policy, monitor, observations)
    return advance_parts(policy, monitor, _pause_between_slices(observations))


def _pause_between_slices(observations: Sequence[Observation]) -> Iterator[Sequence[Observation]]:
    began_at = time.monotonic()
    for first in range(0, len(observations), SLICE):
        if first:
            time.sleep(max(PAUSE_SECONDS, time.monotonic() - began_at))
            began_at = time.monotonic()
        yield observations[first : first + SLICE]


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def observations_past(monitor: MonitorState, observations: list[Observation]) -> list[Observation]:
    """The observations that the monitor has not seen yet."""
    last = monitor.last
    return observations if last is None else [item for item in observations if item.order > last]


def advance_monitor(state: RunState, observations: Sequence[Observation]) -> RunState:
    """The state after its monitor has seen these observations, which follow its last."""
    moved, verdicts = move_monitor(state, observations, _advance_in_slices)
    if len(verdicts) > 1 or moved.monitor.verdict.verdict is not state.monitor.verdict.verdict:
        return replace(moved, unrecorded=(*state.unrecorded, *verdicts))
    return moved
