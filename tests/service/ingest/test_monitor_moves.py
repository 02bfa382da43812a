"""A replay of a run, or a large batch of new observations, gives the same state wherever the monitor moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from evalstop_service.ingest.monitor_moves import SLICE, advance_monitor, replay_monitor, rewind_monitor
from evalstop_service.ingest.run_state import RunState
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import ProjectFixture, evals

OBSERVATIONS = evals(*(0.1 * [1, 2, 3, 2, 1][step % 5] for step in range(3 * SLICE + 5)))
"""Evals that the policy `paper` suspects, and no longer, again and again, also at the end of a slice."""


def replay(rewound: RunState, observations: list[PostedObservation]) -> RunState:
    return replay_monitor(rewound, observations, [])


def advance(rewound: RunState, observations: list[PostedObservation]) -> RunState:
    return advance_monitor(rewound, rewound.watch.observations(observations))


@pytest.mark.parametrize(
    ("policy", "move", "fewest_verdicts"), [("default", replay, 1), ("default", advance, 0), ("paper", advance, SLICE)]
)
def test_moving_in_slices_equals_moving_at_once(
    project: ProjectFixture,
    policy: str,
    move: Callable[[RunState, list[PostedObservation]], RunState],
    fewest_verdicts: int,
) -> None:
    """Outside the event loop's thread a monitor moves in slices, with other threads between them."""
    run = project.open_run(policy=policy)
    project.post_observations(run, OBSERVATIONS)
    state = project.cache.find_state(run.id)
    assert state is not None
    rewound = rewind_monitor(state, None)

    async def move_on_the_loop() -> RunState:
        return move(rewound, OBSERVATIONS)

    at_once = asyncio.run(move_on_the_loop())
    assert at_once.monitor.verdict.evidence
    assert len(at_once.unrecorded) >= fewest_verdicts
    assert move(rewound, OBSERVATIONS) == at_once
