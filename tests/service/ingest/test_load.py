"""What a run's next news cost: nothing where this process has it, little where another moved it on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_detectors import POLICIES, MetricRole, Observation, advance, replay, start
from evalstop_service.ingest import CheckpointSaved, Message, Observations, Resumed, RunCache
from evalstop_service.ingest.load import REPLAY_WEIGHT
from evalstop_service.ingest.run_state import KEEP_EVERY, Trail
from evalstop_service.store import monitor_states
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import ProjectFixture, evals, set_up_project

WAYS = ("hit", "moved_on", "restored", "rebuilt")


def how(project: ProjectFixture, run: Run, points: list[PostedObservation]) -> str:
    """Post, and tell how the run was loaded for it, the last time if more than once."""
    before = {way: project.read_counter("evalstop_loaded_runs_total", result=way) for way in WAYS}
    project.post_observations(run, points)
    return [way for way in WAYS if project.read_counter("evalstop_loaded_runs_total", result=way) > before[way]][-1]


def test_remembers_a_run(project: ProjectFixture) -> None:
    """After its first news a run is in memory, and stays so while nobody else changes it."""
    run = project.open_run()
    assert [how(project, run, evals(0.1, start=step)) for step in range(3)] == ["rebuilt", "hit", "hit"]


def test_moves_on_after_another_process(project: ProjectFixture) -> None:
    """What another process added to the end is read and taken in; the rest is not read again."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    how(project, run, evals(0.1))
    how(other, run, evals(0.2, start=1))
    assert how(project, run, evals(0.3, start=2)) == "moved_on"
    assert how(other, run, evals(0.4, start=3)) == "moved_on"
    assert how(project, run, evals(0.5, start=4)) == "moved_on"
    assert how(other, run, evals(0.6, start=5)) == "moved_on"


def test_moves_on_within_a_step(project: ProjectFixture) -> None:
    """Another process may have taken in the rest of the step that was seen last."""
    run, other = project.open_run(policy="watch-all-roles"), replace(project, cache=RunCache())
    for step in range(4):  # either may be mistaken once
        how(other if step % 2 else project, run, evals(0.1, start=step))
    how(project, run, [PostedObservation("kl", 5, 0.1)])
    how(other, run, [PostedObservation("eval", 5, 0.9)])
    assert how(project, run, evals(0.8, 0.7, start=6)) == "moved_on"
    cold = replace(project, cache=RunCache())
    how(cold, run, [])
    assert project.cached_monitor(run) == cold.cached_monitor(run)


def test_rebuilds_when_the_past_changed(project: ProjectFixture) -> None:
    """When another process took in a late point or a resumption, what is remembered here is no longer true."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    how(project, run, [PostedObservation("eval", 0, 0.1), PostedObservation("eval", 5, 0.2)])
    assert how(other, run, [PostedObservation("eval", 3, 0.9)]) == "rebuilt"
    assert how(project, run, [PostedObservation("eval", 6, 0.3)]) == "rebuilt"
    other.submit(run, Resumed(3))
    assert how(project, run, [PostedObservation("eval", 4, 0.3)]) == "rebuilt"


def test_a_cold_process_starts_from_what_was_kept(project: ProjectFixture) -> None:
    """A long run is not replayed from its beginning; at most as much as lies between two keepings is."""
    run = project.open_run(policy="default")
    for start_step in range(0, 3 * KEEP_EVERY, 64):
        project.post_observations(run, evals(*(step % 7 / 7 for step in range(64)), start=start_step))
    with project.database.reading() as tx:
        assert run.id in monitor_states.load_states(tx, [run.id])
    cold = replace(project, cache=RunCache())
    assert how(cold, run, evals(0.5, start=3 * KEEP_EVERY)) == "restored"
    project.evict_run(run)
    everything = replace(project, cache=RunCache())
    project.drop_monitor_state(run)
    assert how(everything, run, evals(0.6, start=3 * KEEP_EVERY + 1)) == "rebuilt"
    how(cold, run, evals(0.7, start=3 * KEEP_EVERY + 2))
    how(everything, run, evals(0.8, start=3 * KEEP_EVERY + 3))
    how(cold, run, evals(0.9, start=3 * KEEP_EVERY + 4))
    how(everything, run, [])
    assert cold.cached_monitor(run) == everything.cached_monitor(run)


def test_what_was_replayed_is_not_replayed_again(project: ProjectFixture) -> None:
    """A process that had to replay much of a run keeps its state with the next news; little is not worth keeping."""
    replayed, little = project.open_run(), project.open_run()
    worth_it = KEEP_EVERY // REPLAY_WEIGHT
    project.post_observations(replayed, evals(*(step % 7 / 7 for step in range(worth_it))))
    project.post_observations(little, evals(*(step % 7 / 7 for step in range(worth_it // 2))))
    for first, then in ((replayed, "restored"), (little, "rebuilt")):
        assert how(replace(project, cache=RunCache()), first, evals(0.5, start=worth_it)) == "rebuilt"
        assert how(replace(project, cache=RunCache()), first, evals(0.6, start=worth_it + 1)) == then


def test_many_runs_are_read_as_one(embedded_database: Database) -> None:
    """Bringing many runs back takes as many statements as bringing one back, gold and checkpoints included."""
    project = set_up_project(embedded_database)
    opened = [project.open_run(policy="watch-all-roles") for _ in range(9)]
    for run in opened:
        project.submit(run, CheckpointSaved(0, "file:///0"))
        project.post_observations(run, evals(0.1, 0.2, 0.3))

    def statements(some: list[Run], cold: RunCache) -> int:
        arrivals = [Message(project.id, run.id, Observations(tuple(evals(0.4, start=3)))) for run in some]
        counted: list[str] = []

        def keep(*event: Any) -> None:
            if not event[2].startswith("\nUPDATE"):  # of which one is executed for each run
                counted.append(event[2])

        sa.event.listen(embedded_database.engine, "before_cursor_execute", keep)
        try:
            replace(project, cache=cold).submit_all(arrivals)
        finally:
            sa.event.remove(embedded_database.engine, "before_cursor_execute", keep)
        return len(counted)

    assert statements(opened[:1], RunCache()) == statements(opened[1:], RunCache())
    assert project.load_run(opened[8]).best_checkpoint is not None


def test_what_another_process_added_to_many_runs_is_read_at_once(database: Database) -> None:
    """However many runs another process added to, with a best checkpoint: two reads, or three embedded."""
    project = set_up_project(database)
    other = replace(project, cache=RunCache())
    opened = [project.open_run(policy="watch-all-roles") for _ in range(9)]
    messages = [Message(project.id, run.id, CheckpointSaved(0, "file:///0")) for run in opened]
    project.submit_all(messages)

    def post(process: ProjectFixture, some: list[Run], step: int) -> None:
        points = tuple(evals(step / 10, start=step))
        process.submit_all([Message(project.id, run.id, Observations(points)) for run in some])

    def reads(some: list[Run], step: int) -> int:
        post(other, some, step)
        counted: list[str] = []

        def keep(*event: Any) -> None:
            if re.match(r"\s*(SELECT|WITH)", event[2]):
                counted.append(event[2])

        sa.event.listen(sa.Engine, "before_cursor_execute", keep)
        try:
            post(project, some, step + 1)
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", keep)
        return len(counted)

    for step in (0, 2):  # at first neither knows that the other is there
        post(project, opened, step)
        post(other, opened, step + 1)
    assert [reads(opened[:1], 4), reads(opened[1:], 4)] == [3 if database.embedded else 2] * 2
    best = project.load_run(opened[8]).best_checkpoint
    assert best is not None
    assert best.step == 0
    other.submit(opened[8], CheckpointSaved(6, "file:///6"))
    post(other, opened[8:], 6)
    post(project, opened[8:], 7)
    best = project.load_run(opened[8]).best_checkpoint
    assert best is not None
    assert best.step == 6


def test_what_is_long_is_brought_back_beside_what_is_short(project: ProjectFixture) -> None:
    """A run with more evals than are read together stands as it would in memory, and so does its short neighbor."""
    long, short = project.open_run(), project.open_run()
    for run, length in ((long, KEEP_EVERY + 100), (short, 20)):
        project.submit(run, CheckpointSaved(3, "file:///3"))
        project.post_observations(run, evals(*(step % 7 / 7 + step % 5 / 50 for step in range(length))))
    project.drop_monitor_state(long)
    project.drop_monitor_state(short)
    cold = replace(project, cache=RunCache())
    last = Observations(tuple(evals(0.9, start=10_000)))
    cold.submit_all([Message(project.id, run.id, last) for run in (long, short)])
    for run, length in ((long, KEEP_EVERY + 100), (short, 20)):
        twin = project.open_run()
        project.submit(twin, CheckpointSaved(3, "file:///3"))
        project.post_observations(twin, evals(*(step % 7 / 7 + step % 5 / 50 for step in range(length))))
        project.submit(twin, last)
        assert cold.cached_monitor(run) == project.cached_monitor(twin)
        assert cold.load_run(run).best_checkpoint == project.load_run(twin).best_checkpoint is not None


def test_what_processes_share_is_kept(project: ProjectFixture) -> None:
    """A run whose posts are spread over two processes has its state kept as often as one that stays with one."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    for at in range(0, 2 * KEEP_EVERY, 256):
        (other if at % 512 else project).post_observations(run, evals(*(step % 7 / 7 for step in range(256)), start=at))
    assert how(replace(project, cache=RunCache()), run, evals(0.5, start=2 * KEEP_EVERY)) == "restored"


def test_forgets_what_was_not_committed(project: ProjectFixture) -> None:
    """News that could not be committed leave no trace in memory."""
    run = project.open_run()
    how(project, run, evals(0.1))
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE runs RENAME TO runs_away")
    with pytest.raises(Exception, match="runs"):
        project.post_observations(run, evals(0.2, start=1))
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE runs_away RENAME TO runs")
    assert project.post_observations(run, evals(0.2, start=1)).accepted == 1


def test_remembers_no_more_than_it_may(project: ProjectFixture) -> None:
    """The runs that were taken in longest ago are forgotten first."""
    project = replace(project, cache=RunCache(most=2))
    runs = [project.open_run() for _ in range(3)]
    assert [how(project, run, evals(0.1)) for run in runs] == ["rebuilt"] * 3
    assert [how(project, run, evals(0.2, start=1)) for run in runs[1:]] == ["hit"] * 2
    assert how(project, runs[0], evals(0.2, start=1)) == "rebuilt"


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True), st.integers(0, 400))
def test_a_trail_leads_back(steps: list[int], late: int) -> None:
    """From the state it goes back to, all later observations with the late one among them make what a replay makes."""
    policy = POLICIES["paper"]
    seen = [Observation(MetricRole.EVAL, 2 * step, step % 5) for step in sorted(steps)]
    trail, state = Trail(), start(policy)
    for count, observation in enumerate(seen, 1):
        state, _ = advance(policy, state, [observation])
        trail = trail.extended(count, state)
    late_observation = Observation(MetricRole.EVAL, 2 * late + 1, 0.5)
    count, back = trail.before(late_observation).last or (0, start(policy))
    again = sorted([*seen, late_observation], key=lambda item: item.order)[count:]
    assert advance(policy, back, again)[0] == replay(policy, [*seen, late_observation])
