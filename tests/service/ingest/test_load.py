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

from tests.service.scenes import Scene, evals, set_up

WAYS = ("hit", "moved_on", "restored", "rebuilt")


def how(scene: Scene, run: Run, points: list[PostedObservation]) -> str:
    """Post, and tell how the run was loaded for it, the last time if more than once."""
    before = {way: scene.count("evalstop_loaded_runs_total", result=way) for way in WAYS}
    scene.post(run, points)
    return [way for way in WAYS if scene.count("evalstop_loaded_runs_total", result=way) > before[way]][-1]


def test_remembers_a_run(scene: Scene) -> None:
    """After its first news a run is in memory, and stays so while nobody else changes it."""
    run = scene.open()
    assert [how(scene, run, evals(0.1, start=step)) for step in range(3)] == ["rebuilt", "hit", "hit"]


def test_moves_on_after_another_process(scene: Scene) -> None:
    """What another process added to the end is read and taken in; the rest is not read again."""
    run, other = scene.open(), replace(scene, cache=RunCache())
    how(scene, run, evals(0.1))
    how(other, run, evals(0.2, start=1))
    assert how(scene, run, evals(0.3, start=2)) == "moved_on"
    assert how(other, run, evals(0.4, start=3)) == "moved_on"
    assert how(scene, run, evals(0.5, start=4)) == "moved_on"
    assert how(other, run, evals(0.6, start=5)) == "moved_on"


def test_moves_on_within_a_step(scene: Scene) -> None:
    """Another process may have taken in the rest of the step that was seen last."""
    run, other = scene.open(policy="watchful"), replace(scene, cache=RunCache())
    for step in range(4):  # either may be mistaken once
        how(other if step % 2 else scene, run, evals(0.1, start=step))
    how(scene, run, [PostedObservation("kl", 5, 0.1)])
    how(other, run, [PostedObservation("eval", 5, 0.9)])
    assert how(scene, run, evals(0.8, 0.7, start=6)) == "moved_on"
    cold = replace(scene, cache=RunCache())
    how(cold, run, [])
    assert scene.monitor(run) == cold.monitor(run)


def test_rebuilds_when_the_past_changed(scene: Scene) -> None:
    """When another process took in a late point or a resumption, what is remembered here is no longer true."""
    run, other = scene.open(), replace(scene, cache=RunCache())
    how(scene, run, [PostedObservation("eval", 0, 0.1), PostedObservation("eval", 5, 0.2)])
    assert how(other, run, [PostedObservation("eval", 3, 0.9)]) == "rebuilt"
    assert how(scene, run, [PostedObservation("eval", 6, 0.3)]) == "rebuilt"
    other.take(run, Resumed(3))
    assert how(scene, run, [PostedObservation("eval", 4, 0.3)]) == "rebuilt"


def test_a_cold_process_starts_from_what_was_kept(scene: Scene) -> None:
    """A long run is not replayed from its beginning; at most as much as lies between two keepings is."""
    run = scene.open(policy="default")
    for start_step in range(0, 3 * KEEP_EVERY, 64):
        scene.post(run, evals(*(step % 7 / 7 for step in range(64)), start=start_step))
    with scene.database.reading() as tx:
        assert run.id in monitor_states.load_states(tx, [run.id])
    cold = replace(scene, cache=RunCache())
    assert how(cold, run, evals(0.5, start=3 * KEEP_EVERY)) == "restored"
    scene.forget_run(run)
    everything = replace(scene, cache=RunCache())
    scene.forget_state(run)
    assert how(everything, run, evals(0.6, start=3 * KEEP_EVERY + 1)) == "rebuilt"
    how(cold, run, evals(0.7, start=3 * KEEP_EVERY + 2))
    how(everything, run, evals(0.8, start=3 * KEEP_EVERY + 3))
    how(cold, run, evals(0.9, start=3 * KEEP_EVERY + 4))
    how(everything, run, [])
    assert cold.monitor(run) == everything.monitor(run)


def test_what_was_replayed_is_not_replayed_again(scene: Scene) -> None:
    """A process that had to replay much of a run keeps its state with the next news; little is not worth keeping."""
    replayed, little = scene.open(), scene.open()
    worth_it = KEEP_EVERY // REPLAY_WEIGHT
    scene.post(replayed, evals(*(step % 7 / 7 for step in range(worth_it))))
    scene.post(little, evals(*(step % 7 / 7 for step in range(worth_it // 2))))
    for first, then in ((replayed, "restored"), (little, "rebuilt")):
        assert how(replace(scene, cache=RunCache()), first, evals(0.5, start=worth_it)) == "rebuilt"
        assert how(replace(scene, cache=RunCache()), first, evals(0.6, start=worth_it + 1)) == then


def test_many_runs_are_read_as_one(embedded_database: Database) -> None:
    """Bringing many runs back takes as many statements as bringing one back, gold and checkpoints included."""
    scene = set_up(embedded_database)
    opened = [scene.open(policy="watchful") for _ in range(9)]
    for run in opened:
        scene.take(run, CheckpointSaved(0, "file:///0"))
        scene.post(run, evals(0.1, 0.2, 0.3))

    def statements(some: list[Run], cold: RunCache) -> int:
        arrivals = [Message(scene.project_id, run.id, Observations(tuple(evals(0.4, start=3)))) for run in some]
        counted: list[str] = []

        def keep(*event: Any) -> None:
            if not event[2].startswith("\nUPDATE"):  # of which one is executed for each run
                counted.append(event[2])

        sa.event.listen(embedded_database.engine, "before_cursor_execute", keep)
        try:
            replace(scene, cache=cold).take_all(arrivals)
        finally:
            sa.event.remove(embedded_database.engine, "before_cursor_execute", keep)
        return len(counted)

    assert statements(opened[:1], RunCache()) == statements(opened[1:], RunCache())
    assert scene.read(opened[8]).best_checkpoint is not None


def test_what_another_process_added_to_many_runs_is_read_at_once(database: Database) -> None:
    """However many runs another process added to, with a best checkpoint: two reads, or three embedded."""
    scene = set_up(database)
    other = replace(scene, cache=RunCache())
    opened = [scene.open(policy="watchful") for _ in range(9)]
    messages = [Message(scene.project_id, run.id, CheckpointSaved(0, "file:///0")) for run in opened]
    scene.take_all(messages)

    def post(process: Scene, some: list[Run], step: int) -> None:
        points = tuple(evals(step / 10, start=step))
        process.take_all([Message(scene.project_id, run.id, Observations(points)) for run in some])

    def reads(some: list[Run], step: int) -> int:
        post(other, some, step)
        counted: list[str] = []

        def keep(*event: Any) -> None:
            if re.match(r"\s*(SELECT|WITH)", event[2]):
                counted.append(event[2])

        sa.event.listen(sa.Engine, "before_cursor_execute", keep)
        try:
            post(scene, some, step + 1)
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", keep)
        return len(counted)

    for step in (0, 2):  # at first neither knows that the other is there
        post(scene, opened, step)
        post(other, opened, step + 1)
    assert [reads(opened[:1], 4), reads(opened[1:], 4)] == [3 if database.embedded else 2] * 2
    best = scene.read(opened[8]).best_checkpoint
    assert best is not None
    assert best.step == 0
    other.take(opened[8], CheckpointSaved(6, "file:///6"))
    post(other, opened[8:], 6)
    post(scene, opened[8:], 7)
    best = scene.read(opened[8]).best_checkpoint
    assert best is not None
    assert best.step == 6


def test_what_is_long_is_brought_back_beside_what_is_short(scene: Scene) -> None:
    """A run with more evals than are read together stands as it would in memory, and so does its short neighbor."""
    long, short = scene.open(), scene.open()
    for run, length in ((long, KEEP_EVERY + 100), (short, 20)):
        scene.take(run, CheckpointSaved(3, "file:///3"))
        scene.post(run, evals(*(step % 7 / 7 + step % 5 / 50 for step in range(length))))
    scene.forget_state(long)
    scene.forget_state(short)
    cold = replace(scene, cache=RunCache())
    last = Observations(tuple(evals(0.9, start=10_000)))
    cold.take_all([Message(scene.project_id, run.id, last) for run in (long, short)])
    for run, length in ((long, KEEP_EVERY + 100), (short, 20)):
        twin = scene.open()
        scene.take(twin, CheckpointSaved(3, "file:///3"))
        scene.post(twin, evals(*(step % 7 / 7 + step % 5 / 50 for step in range(length))))
        scene.take(twin, last)
        assert cold.monitor(run) == scene.monitor(twin)
        assert cold.read(run).best_checkpoint == scene.read(twin).best_checkpoint is not None


def test_what_processes_share_is_kept(scene: Scene) -> None:
    """A run whose posts are spread over two processes has its state kept as often as one that stays with one."""
    run, other = scene.open(), replace(scene, cache=RunCache())
    for at in range(0, 2 * KEEP_EVERY, 256):
        (other if at % 512 else scene).post(run, evals(*(step % 7 / 7 for step in range(256)), start=at))
    assert how(replace(scene, cache=RunCache()), run, evals(0.5, start=2 * KEEP_EVERY)) == "restored"


def test_forgets_what_was_not_committed(scene: Scene) -> None:
    """News that could not be committed leave no trace in memory."""
    run = scene.open()
    how(scene, run, evals(0.1))
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE runs RENAME TO runs_away")
    with pytest.raises(Exception, match="runs"):
        scene.post(run, evals(0.2, start=1))
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE runs_away RENAME TO runs")
    assert scene.post(run, evals(0.2, start=1)).accepted == 1


def test_remembers_no_more_than_it_may(scene: Scene) -> None:
    """The runs that were taken in longest ago are forgotten first."""
    scene = replace(scene, cache=RunCache(most=2))
    runs = [scene.open() for _ in range(3)]
    assert [how(scene, run, evals(0.1)) for run in runs] == ["rebuilt"] * 3
    assert [how(scene, run, evals(0.2, start=1)) for run in runs[1:]] == ["hit"] * 2
    assert how(scene, runs[0], evals(0.2, start=1)) == "rebuilt"


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
