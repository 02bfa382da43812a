"""A replay of a run, or a large batch of new observations, gives the same state wherever the monitor moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from evalstop_detectors import Evidence, Kind, Member, MetricRole, Observation, Policy, start
from evalstop_service.ingest.monitor_moves import SLICE, advance_monitor, replay_monitor, rewind_monitor
from evalstop_service.ingest.run_state import RunState
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store.observations import PostedObservation
from msgspec.structs import replace

from tests.service.fake_detectors import FakeDetector
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
    state = project.cached_state(run)
    rewound = rewind_monitor(state, None)

    async def move_on_the_loop() -> RunState:
        return move(rewound, OBSERVATIONS)

    at_once = asyncio.run(move_on_the_loop())
    assert at_once.monitor.verdict.evidence
    assert len(at_once.unrecorded) >= fewest_verdicts
    assert move(rewound, OBSERVATIONS) == at_once


class CountingDetector(FakeDetector, frozen=True):
    """Records how many observations it is shown at once."""

    shown: list[int]

    name: ClassVar[str] = "counting"

    def step(self, state: int, observation: Observation) -> tuple[int, Evidence]:
        self.shown.append(1)
        return state + 1, Evidence(Kind.COUNT, 0.0)

    def fold(self, state: int, evidence: Evidence | None, columns: Any) -> tuple[int, list[Any]]:
        self.shown.append(len(columns[MetricRole.EVAL].steps))
        return state + self.shown[-1], []


def test_loaded_run_catches_up_at_once(project: ProjectFixture) -> None:
    """On the embedded database every commit waits for the thread that loads a run, so it does not pause."""
    run = project.open_run()
    project.post_observations(run, OBSERVATIONS[:1])
    state = project.cached_state(run)
    project.post_observations(run, OBSERVATIONS[1:])
    policy = Policy("counting", (Member(detector := CountingDetector([]), detector.thresholds),))
    behind = replace(state, policy=policy, watch=WatchedMetrics(state.run, policy), monitor=start(policy), shared=1)
    project.cache.put_states([behind])
    project.post_observations(run, evals(0.5, start=len(OBSERVATIONS)))
    assert detector.shown == [len(OBSERVATIONS), 1]
