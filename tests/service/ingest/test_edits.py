"""Edits and appends of one run by several processes, and how a monitor moves: it ends as if all came in order."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import pytest
from evalstop_detectors import Evidence, Kind, Member, Observation, Policy, Verdict, start
from evalstop_service.ingest import CheckpointSaved, RunCache
from evalstop_service.ingest.run_state import SLICE, RunState, move_monitor
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from msgspec import structs

from tests.faults.run_records import summarize_run
from tests.service.fake_detectors import FakeDetector
from tests.service.project_fixture import ProjectFixture, evals

DEADLINE_SECONDS = 60.0

SCORES = [0.1, 0.4, 0.9, 0.8, 0.85, 0.7, 0.6, 0.5]


class WaitingDetector(FakeDetector, frozen=True):
    """Waits in its first step until the run was appended to."""

    begun: threading.Event
    appended: threading.Event

    name: ClassVar[str] = "waiting"

    def step(self, state: int, observation: Observation) -> tuple[int, Evidence]:
        self.begun.set()
        assert self.appended.wait(DEADLINE_SECONDS)
        return state + 1, Evidence(Kind.COUNT, 0.0)


def ingest_in_order(project: ProjectFixture, points: list[PostedObservation], saved: list[int]) -> Run:
    run = project.open_run()
    for step in saved:
        project.submit(run, CheckpointSaved(step, f"file:///{step}"))
    project.post_observations(run, points)
    return project.load_run(run)


def test_run_that_changes_during_an_edit_is_judged_again(project: ProjectFixture) -> None:
    """Nobody waits for the replay, since it holds no lock, and what was appended meanwhile counts."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    points = evals(*SCORES)
    project.post_observations(run, [*points[:2], *points[3:6]])
    state = project.cached_state(run)
    detector = WaitingDetector(threading.Event(), threading.Event())
    policy = Policy("waiting", (Member(detector, detector.thresholds),))
    waiting = structs.replace(start(policy), last=state.monitor.last)
    project.cache.put_states([structs.replace(state, watch=WatchedMetrics(state.run, policy), monitor=waiting)])
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(project.post_observations, run, points[2:3])
        try:
            assert detector.begun.wait(DEADLINE_SECONDS)
            assert other.post_observations(run, points[6:]).accepted == 2
        finally:
            detector.appended.set()
        assert late.result(DEADLINE_SECONDS).accepted == 1
    assert summarize_run(project.load_run(run)) == summarize_run(ingest_in_order(project, points, []))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_edits_and_appends_of_two_processes_agree(project: ProjectFixture, seed: int) -> None:
    """Late observations and checkpoints in one process, new observations in another, at the same time."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    points = evals(*(0.3 + 0.1 * SCORES[step % len(SCORES)] + 0.01 * min(step, 30 - step) for step in range(40)))
    late, new, saved = points[1:20:2], [*points[0:20:2], *points[20:]], [4, 11, 18]
    random.Random(seed).shuffle(late)
    project.post_observations(run, new[:10])

    def edit() -> None:
        for index, point in enumerate(late):
            project.post_observations(run, [point])
            if index < len(saved):
                project.submit(run, CheckpointSaved(saved[index], f"file:///{saved[index]}"))

    with ThreadPoolExecutor(1) as threads:
        editing = threads.submit(edit)
        for point in new[10:]:
            other.post_observations(run, [point])
        editing.result(DEADLINE_SECONDS)
    expected = ingest_in_order(project, points, saved)
    assert summarize_run(project.load_run(run)) == summarize_run(expected)
    assert other.post_observations(run, points).duplicates == len(points)
    for process in (project, other):
        process.post_observations(run, [])
    assert project.cached_monitor(run) == other.cached_monitor(run) == project.cached_monitor(expected)


OBSERVATIONS = evals(*(0.1 * [1, 2, 3, 2, 1][step % 5] for step in range(3 * SLICE + 5)))
"""Evals that the policy `paper` suspects, and no longer, again and again, also at the end of a slice."""


@pytest.mark.parametrize(("policy", "fewest_verdicts"), [("default", 0), ("paper", SLICE)])
def test_moving_in_slices_equals_moving_at_once(project: ProjectFixture, policy: str, fewest_verdicts: int) -> None:
    """Outside the event loop's thread a monitor moves in slices, with other threads between them."""
    run = project.open_run(policy=policy)
    project.post_observations(run, OBSERVATIONS)
    state = project.cached_state(run)
    rewound, observations = structs.replace(state, monitor=start(state.policy)), state.watch.observations(OBSERVATIONS)

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
    project.cache.put_states([structs.replace(state, watch=WatchedMetrics(state.run, policy), monitor=start(policy))])
    project.cache.shared.add(run.id)
    project.post_observations(run, evals(0.5, start=len(OBSERVATIONS)))
    assert detector.shown == list(range(len(OBSERVATIONS) + 1))
