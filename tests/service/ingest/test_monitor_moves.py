"""A replay of a run, or a large batch of new observations, gives the same state wherever the monitor moves."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest
from evalstop_detectors import Evidence, Kind, Member, Observation, Policy, Verdict, start
from evalstop_service.ingest.run_state import SLICE, RunState, move_monitor
from evalstop_service.runs.watched_metrics import WatchedMetrics
from msgspec.structs import replace

from tests.service.fake_detectors import FakeDetector
from tests.service.project_fixture import ProjectFixture, evals

OBSERVATIONS = evals(*(0.1 * [1, 2, 3, 2, 1][step % 5] for step in range(3 * SLICE + 5)))
"""Evals that the policy `paper` suspects, and no longer, again and again, also at the end of a slice."""


@pytest.mark.parametrize(("policy", "fewest_verdicts"), [("default", 0), ("paper", SLICE)])
def test_moving_in_slices_equals_moving_at_once(project: ProjectFixture, policy: str, fewest_verdicts: int) -> None:
    """Outside the event loop's thread a monitor moves in slices, with other threads between them."""
    run = project.open_run(policy=policy)
    project.post_observations(run, OBSERVATIONS)
    state = project.cached_state(run)
    rewound, observations = replace(state, monitor=start(state.policy)), state.watch.observations(OBSERVATIONS)

    async def move_on_the_loop() -> tuple[RunState, list[Verdict]]:
        return move_monitor(rewound, observations)

    moved, verdicts = asyncio.run(move_on_the_loop())
    assert moved.monitor.verdict.evidence
    assert len(verdicts) >= fewest_verdicts
    assert move_monitor(rewound, observations) == (moved, verdicts)


class CountingDetector(FakeDetector, frozen=True):
    """Records the steps of the observations that it is shown."""

    shown: list[int]

    name: ClassVar[str] = "counting"

    def step(self, state: int, observation: Observation) -> tuple[int, Evidence]:
        self.shown.append(observation.step)
        return state + 1, Evidence(Kind.COUNT, 0.0)


def test_cached_run_catches_up_with_other_replicas(project: ProjectFixture) -> None:
    """Observations that another replica took are shown to the detectors before a new one, each once."""
    run = project.open_run()
    project.post_observations(run, OBSERVATIONS[:1])
    state = project.cached_state(run)
    project.post_observations(run, OBSERVATIONS[1:])
    policy = Policy("counting", (Member(detector := CountingDetector([]), detector.thresholds),))
    project.cache.put_states([replace(state, watch=WatchedMetrics(state.run, policy), monitor=start(policy))])
    project.cache.shared.add(run.id)
    project.post_observations(run, evals(0.5, start=len(OBSERVATIONS)))
    assert detector.shown == list(range(len(OBSERVATIONS) + 1))
