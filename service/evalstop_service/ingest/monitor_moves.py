"""Moves a run's monitor: forward by new observations, or back and through its past again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from evalstop_detectors import MonitorState, Observation, Policy, Verdict, advance, advance_parts, start
from msgspec.structs import replace

from evalstop_service.ingest.run_state import RunState, Trail
from evalstop_service.store.observations import PostedObservation

LATE_WEIGHT = 128
"""The weight of a late observation towards storing the monitor: it makes a stored one useless to other processes."""

SLICE = 16
"""Observations in a thread after which other threads run."""

PAUSE_SECONDS = 0.0002
"""Longer than a thread takes to wake up."""


def rewind_monitor(state: RunState, late: Observation | None) -> RunState:
    """The state with its monitor as before a late observation, if still in memory, or at the beginning."""
    trail = state.trail.before(late) if late is not None else Trail()
    count, monitor = trail.last or (0, start(state.policy))
    return replace(state, monitor=monitor, count=count, trail=trail)


def replay_monitor(
    state: RunState, stored: Sequence[PostedObservation], fresh: Sequence[PostedObservation]
) -> RunState:
    """The state after its rewound monitor has seen all stored and new observations."""
    observations = observations_past(state.monitor, state.watch.observations([*stored, *fresh]))
    monitor, _ = _advance_in_slices(state.policy, state.monitor, observations)
    count = state.count + len(observations)
    return replace(
        state,
        monitor=monitor,
        unrecorded=(*state.unrecorded, monitor.verdict),
        count=count,
        unkept=state.unkept + len(observations) + LATE_WEIGHT,
        trail=state.trail.extended(count, monitor),
    )


def _advance_in_slices(
    policy: Policy, monitor: MonitorState, observations: Sequence[Observation]
) -> tuple[MonitorState, list[Verdict]]:
    """Like `advance`; outside the event loop's thread, other threads run after each slice.

    numpy releases the interpreter's lock for microseconds several times in each step. Each release wakes the threads
    that wait for the lock, too late, and their wait, after which the interpreter would hand it over, begins anew: in
    the middle of a long replay or batch the event loop could wait for 0.1 s.
    """
    if len(observations) <= SLICE or _runs_event_loop():
        return advance(policy, monitor, observations)
    return advance_parts(policy, monitor, _pause_between_slices(observations))


def _pause_between_slices(observations: Sequence[Observation]) -> Iterator[Sequence[Observation]]:
    for first in range(0, len(observations), SLICE):
        if first:
            time.sleep(PAUSE_SECONDS)
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
    monitor, verdicts = _advance_in_slices(state.policy, state.monitor, observations)
    unrecorded = state.unrecorded
    if len(verdicts) > 1 or monitor.verdict.verdict is not state.monitor.verdict.verdict:
        unrecorded = (*unrecorded, *verdicts)
    count = state.count + len(observations)
    return replace(
        state,
        monitor=monitor,
        unrecorded=unrecorded,
        count=count,
        unkept=state.unkept + len(observations),
        trail=state.trail.extended(count, monitor),
    )
