"""Limits on what one key may cost: replays by late observations, and detectors over their budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar
from uuid import UUID, uuid4

import pytest
from evalstop_detectors import Evidence, Kind, Member, Observation, Policy, start
from evalstop_service.errors import TooOften
from evalstop_service.ingest import Committer, Limits, Message, Observations, RunCache, running_in_thread
from evalstop_service.ingest.messages import REPLAYS, EditCosts
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.security.rate_limits import Rate
from evalstop_service.store import runs
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.fake_detectors import FakeDetector
from tests.service.project_fixture import NOW, ProjectFixture, evals, set_up_project


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


OBSERVATION = PostedObservation("eval", 1, 0.5)
OWED_SECONDS = 2 * REPLAYS.burst / 1000


def test_key_over_its_replay_share_waits_with_replays() -> None:
    """Other keys and requests without a key do not wait."""
    costs, sender, other = EditCosts(Limits()), uuid4(), uuid4()
    message = Message(uuid4(), uuid4(), Observations((OBSERVATION,)), sender)
    costs.require_share(message)
    costs.charge(message, OWED_SECONDS)
    with pytest.raises(TooOften) as refused:
        costs.require_share(message)
    assert refused.value.seconds > 0
    costs.require_share(Message(uuid4(), uuid4(), message.content, other))
    costs.require_share(Message(uuid4(), uuid4(), message.content))


def test_late_observation_over_the_share_is_refused(project: ProjectFixture) -> None:
    """The refusal is counted; observations in order and those of other keys are stored."""
    cache, sender = RunCache(), uuid4()
    committer = Committer(project.database, cache, lambda: NOW, metrics := ServiceMetrics())
    run = project.open_run()

    def post(step: int, key: UUID | None = sender) -> int:
        content = Observations(tuple(evals(0.5, start=step)))
        message = Message(project.id, run.id, content, key)
        return committer.submit_and_wait(message).accepted

    with running_in_thread(committer):
        assert post(10) == 1
        assert post(20) == 1
        committer.costs.charge(Message(project.id, run.id, Observations((OBSERVATION,)), sender), OWED_SECONDS)
        with pytest.raises(TooOften, match="late"):
            post(5)
        assert post(30) == 1
        assert post(5, None) == 1
    assert metrics.registry.get_sample_value("evalstop_refused_requests_total", {"reason": "replays"}) == 1


def test_replay_is_charged_by_its_cpu_time(project: ProjectFixture) -> None:
    """With a minimal share, one late observation delays the next."""
    limits = Limits(replays=Rate(burst=1.0, per_second=1e-9))
    committer, sender = Committer(project.database, RunCache(), lambda: NOW, ServiceMetrics(), limits), uuid4()
    run = project.open_run()

    def post(step: int) -> int:
        content = Observations(tuple(evals(0.5, start=step)))
        return committer.submit_and_wait(Message(project.id, run.id, content, sender)).accepted

    with running_in_thread(committer):
        assert [post(step) for step in (10, 20, 5, 30)] == [1, 1, 1, 1]
        with pytest.raises(TooOften, match="late"):
            post(4)


def test_rebuilding_after_a_changed_plan_is_charged(project: ProjectFixture) -> None:
    """With a minimal share, the key may not change another plan."""
    limits = Limits(replays=Rate(burst=1.0, per_second=1e-9))
    committer, sender = Committer(project.database, RunCache(), lambda: NOW, ServiceMetrics(), limits), uuid4()
    run = project.open_run()

    def post(first: int, count: int = 1) -> int:
        content = Observations(tuple(evals(*[0.5] * count, start=first)))
        return committer.submit_and_wait(Message(project.id, run.id, content, sender)).accepted

    with running_in_thread(committer):
        assert post(0, 2000) == 2000
        committer.costs.require_room(sender, project.id)
        with project.database.transaction() as tx:
            locked = runs.lock_run(tx, project.id, run.id)
            version = locked.version + 1
            runs.save_run(tx, replace(locked, total_steps=10**6, version=version, rewritten_version=version))
        assert post(2000) == 1
        with pytest.raises(TooOften, match="plans"):
            committer.costs.require_room(sender, project.id)


def test_replay_does_not_delay_other_runs(project: ProjectFixture) -> None:
    """While a late observation has a long run replayed, posts of another run are committed and answered."""
    committer = Committer(project.database, RunCache(), lambda: NOW, ServiceMetrics(), Limits(slow_seconds=3600.0))
    long, other = project.open_run(), project.open_run()

    def message(run: Run, points: Sequence[PostedObservation]) -> Message:
        return Message(project.id, run.id, Observations(tuple(points)))

    async def post() -> bool:
        async with committer.run():
            await committer.submit(message(long, evals(*[0.5] * 4000, start=1)))
            await committer.submit(message(other, evals(0.5, start=0)))
            late = committer.submit(message(long, evals(0.5, start=0)))
            await asyncio.sleep(0)  # the commit of the late point starts
            for step in (1, 2):
                answered = committer.submit(message(other, evals(0.5, start=step)))
                await asyncio.wait([late, answered], return_when=asyncio.FIRST_COMPLETED)
            is_replaying = not late.done()
            await late
            return is_replaying

    assert asyncio.run(post())


@pytest.mark.parametrize(("step_seconds", "commits"), [(0.0, 2), (60.0, 1)])
def test_costly_run_is_committed_separately(project: ProjectFixture, step_seconds: float, commits: int) -> None:
    """Messages of a run over the budget share no commit with those of other runs."""
    metrics = ServiceMetrics()
    committer = Committer(project.database, RunCache(), lambda: NOW, metrics, Limits(step_seconds=step_seconds))
    costly, other = project.open_run(), project.open_run()

    def message(run: Run, step: int) -> Message:
        return Message(project.id, run.id, Observations(tuple(evals(0.5, start=step))))

    def count(name: str) -> float:
        return metrics.registry.get_sample_value(name) or 0.0

    async def post() -> float:
        async with committer.run():
            await committer.submit(message(costly, 0))
            before = count("evalstop_commit_requests_count")
            await asyncio.gather(committer.submit(message(costly, 1)), committer.submit(message(other, 1)))
            return count("evalstop_commit_requests_count") - before

    assert asyncio.run(post()) == commits
    assert (count("evalstop_costly_steps_total") > 0) == (commits == 2)


class RestingDetector(FakeDetector, frozen=True):
    """Rests for longer than the budget, as a replay does between its slices."""

    name: ClassVar[str] = "resting"

    def step(self, state: int, observation: Observation) -> tuple[int, Evidence]:
        time.sleep(0.3)
        return state + 1, Evidence(Kind.COUNT, 0.0)


def rest_in_each_step(project: ProjectFixture, run: Run) -> None:
    """Have the cached run judged by `RestingDetector`."""
    state = project.cached_state(run)
    policy = Policy("resting", (Member(RestingDetector(), RestingDetector.thresholds),))
    watch, monitor = WatchedMetrics(state.run, policy), replace(start(policy), last=state.monitor.last)
    project.cache.put_states([replace(state, watch=watch, monitor=monitor)])


def test_run_is_not_costly_for_the_time_that_its_replay_rests(project: ProjectFixture) -> None:
    """Only the time that its detectors compute counts."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    project.post_observations(run, evals(0.5, start=2))
    rest_in_each_step(project, run)
    metrics, limits = ServiceMetrics(), Limits(step_seconds=0.2)
    committer = Committer(project.database, project.cache, lambda: NOW, metrics, limits)
    with running_in_thread(committer):
        committer.submit_and_wait(Message(project.id, run.id, Observations(tuple(evals(0.6, start=1)))))
    assert metrics.registry.get_sample_value("evalstop_costly_steps_total") == 0


def test_run_is_no_longer_costly_after_a_step_within_the_budget(project: ProjectFixture) -> None:
    """The first step takes too long on the event loop; in a thread of its own the second computes for a moment."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    rest_in_each_step(project, run)
    metrics, limits = ServiceMetrics(), Limits(step_seconds=0.2)
    committer = Committer(project.database, project.cache, lambda: NOW, metrics, limits)
    counts = []
    with running_in_thread(committer):
        for step in (1, 2, 3):
            committer.submit_and_wait(Message(project.id, run.id, Observations(tuple(evals(0.5, start=step)))))
            counts.append(metrics.registry.get_sample_value("evalstop_costly_steps_total"))
    assert counts == [1, 1, 2]
