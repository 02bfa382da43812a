"""A replay of a run gives the same state wherever it runs."""

from __future__ import annotations

import asyncio

from evalstop_service.ingest.monitor_moves import SLICE, replay_monitor, rewind_monitor
from evalstop_service.ingest.run_state import RunState

from tests.service.project_fixture import ProjectFixture, evals


def test_replay_in_slices_equals_a_replay_at_once(project: ProjectFixture) -> None:
    """Outside the event loop's thread a run is replayed in slices, with other threads between them."""
    run = project.open_run(policy="default")
    observations = evals(*(0.1 + 0.05 * (step % 7) for step in range(3 * SLICE + 5)))
    project.post_observations(run, observations)
    state = project.cache.find_state(run.id)
    assert state is not None
    rewound = rewind_monitor(state, None)

    async def replay_on_the_loop() -> RunState:
        return replay_monitor(rewound, observations, [])

    at_once = asyncio.run(replay_on_the_loop())
    assert at_once.monitor.verdict.evidence
    assert replay_monitor(rewound, observations, []) == at_once
