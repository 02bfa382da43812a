"""How a run is loaded for its next message: from the cache, brought up to date, restored or rebuilt."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_detectors import state_from_json
from evalstop_service.ingest import CheckpointSaved, Message, Observations, Resumed, RunCache
from evalstop_service.ingest.load import REPLAY_WEIGHT
from evalstop_service.ingest.run_state import SAVE_EVERY
from evalstop_service.store import ingest
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.fixtures.statements import record_statements
from tests.service.project_fixture import ProjectFixture, evals, set_up_project

RESULTS = ("hit", "moved_on", "restored", "rebuilt")


def post_and_read_result(project: ProjectFixture, run: Run, observations: list[PostedObservation]) -> str:
    """Post observations; return how the run was loaded, the last time if more than once."""
    before = {result: project.read_counter("evalstop_loaded_runs_total", result=result) for result in RESULTS}
    project.post_observations(run, observations)
    return [
        result
        for result in RESULTS
        if project.read_counter("evalstop_loaded_runs_total", result=result) > before[result]
    ][-1]


def test_run_stays_in_the_cache(project: ProjectFixture) -> None:
    """After its first message a run is in the cache, while no other process changes it."""
    run = project.open_run()
    assert [post_and_read_result(project, run, evals(0.1, start=step)) for step in range(3)] == [
        "rebuilt",
        "hit",
        "hit",
    ]


def test_observations_of_another_process_are_added(project: ProjectFixture) -> None:
    """Only the observations that another process added at the end are read."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    post_and_read_result(project, run, evals(0.1))
    post_and_read_result(other, run, evals(0.2, start=1))
    assert post_and_read_result(project, run, evals(0.3, start=2)) == "moved_on"
    assert post_and_read_result(other, run, evals(0.4, start=3)) == "moved_on"
    assert post_and_read_result(project, run, evals(0.5, start=4)) == "moved_on"
    assert post_and_read_result(other, run, evals(0.6, start=5)) == "moved_on"


def test_run_is_restored_when_the_past_changed(project: ProjectFixture) -> None:
    """A late observation or a resume in another process invalidates the cached state, and stores one before it."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    post_and_read_result(project, run, [PostedObservation("eval", 0, 0.1), PostedObservation("eval", 5, 0.2)])
    assert post_and_read_result(other, run, [PostedObservation("eval", 3, 0.9)]) == "rebuilt"
    assert post_and_read_result(project, run, [PostedObservation("eval", 6, 0.3)]) == "restored"
    other.submit(run, Resumed(3))
    assert post_and_read_result(project, run, [PostedObservation("eval", 4, 0.3)]) == "restored"


def test_new_process_restores_the_saved_state(project: ProjectFixture) -> None:
    """A long run is replayed from its last saved state, not from the beginning."""
    run = project.open_run()
    length = SAVE_EVERY + 512
    for start_step in range(0, length, 512):
        project.post_observations(run, evals(*(step % 7 / 7 for step in range(512)), start=start_step))
    with project.database.reading() as tx:
        assert run.id in ingest.load_states(tx, [run.id])
    cold = replace(project, cache=RunCache())
    assert post_and_read_result(cold, run, evals(0.5, start=length)) == "restored"
    project.evict_run(run)
    everything = replace(project, cache=RunCache())
    project.drop_monitor_state(run)
    assert post_and_read_result(everything, run, evals(0.6, start=length + 1)) == "rebuilt"
    post_and_read_result(cold, run, evals(0.7, start=length + 2))
    post_and_read_result(everything, run, evals(0.8, start=length + 3))
    post_and_read_result(cold, run, evals(0.9, start=length + 4))
    post_and_read_result(everything, run, [])
    assert cold.cached_monitor(run) == everything.cached_monitor(run)


def test_replayed_state_is_saved(project: ProjectFixture) -> None:
    """A process that replayed much of a run saves its state with the next message; a short replay is not saved."""
    long_run, short_run = project.open_run(), project.open_run()
    worth_saving = SAVE_EVERY // REPLAY_WEIGHT
    project.post_observations(long_run, evals(*(step % 7 / 7 for step in range(worth_saving))))
    project.post_observations(short_run, evals(*(step % 7 / 7 for step in range(worth_saving // 2))))
    for run, expected in ((long_run, "restored"), (short_run, "rebuilt")):
        assert (
            post_and_read_result(replace(project, cache=RunCache()), run, evals(0.5, start=worth_saving)) == "rebuilt"
        )
        assert (
            post_and_read_result(replace(project, cache=RunCache()), run, evals(0.6, start=worth_saving + 1))
            == expected
        )


def test_many_runs_take_as_many_statements_as_one(embedded_database: Database) -> None:
    """Loading many runs takes as many statements as loading one, evals and checkpoints included."""
    project = set_up_project(embedded_database)
    all_runs = [project.open_run(policy="watch-all-roles") for _ in range(9)]
    for run in all_runs:
        project.submit(run, CheckpointSaved(0, "file:///0"))
        project.post_observations(run, evals(0.1, 0.2, 0.3))

    def count_statements(runs: list[Run], cold: RunCache) -> int:
        messages = [Message(project.id, run.id, Observations(tuple(evals(0.4, start=3)))) for run in runs]
        with record_statements(embedded_database) as executed:
            replace(project, cache=cold).submit_all(messages)
        return sum(not statement.startswith("\nUPDATE") for statement in executed)  # there is one UPDATE for each run

    assert count_statements(all_runs[:1], RunCache()) == count_statements(all_runs[1:], RunCache())
    assert project.load_run(all_runs[8]).best_checkpoint is not None


def test_updates_of_many_runs_are_read_together(database: Database) -> None:
    """However many runs another process added to: three reads."""
    project = set_up_project(database)
    other = replace(project, cache=RunCache())
    all_runs = [project.open_run(policy="watch-all-roles") for _ in range(9)]
    messages = [Message(project.id, run.id, CheckpointSaved(0, "file:///0")) for run in all_runs]
    project.submit_all(messages)

    def post(process: ProjectFixture, runs: list[Run], step: int) -> None:
        observations = tuple(evals(step / 10, start=step))
        process.submit_all([Message(project.id, run.id, Observations(observations)) for run in runs])

    def count_reads(runs: list[Run], step: int) -> int:
        post(other, runs, step)
        executed_reads: list[str] = []

        def record_read(*event: Any) -> None:
            connection, _, statement, *_ = event
            # Services of other tests may still run; the engine on the event loop has no name of a database.
            is_ours = connection.engine.url.database in (None, database.url.database)
            if is_ours and re.match(r"\s*(SELECT|WITH)", statement):
                executed_reads.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", record_read)
        try:
            post(project, runs, step + 1)
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", record_read)
        return len(executed_reads)

    for step in (0, 2):  # at first neither process knows of the other
        post(project, all_runs, step)
        post(other, all_runs, step + 1)
    assert [count_reads(all_runs[:1], 4), count_reads(all_runs[1:], 4)] == [3, 3]
    best = project.load_run(all_runs[8]).best_checkpoint
    assert best is not None
    assert best.step == 0
    other.submit(all_runs[8], CheckpointSaved(6, "file:///6"))
    post(other, all_runs[8:], 6)
    post(project, all_runs[8:], 7)
    best = project.load_run(all_runs[8]).best_checkpoint
    assert best is not None
    assert best.step == 6


def test_long_run_is_loaded_beside_a_short_one(project: ProjectFixture) -> None:
    """A run with more evals than are read together is loaded correctly, and so is a short run with it."""
    long_run, short_run = project.open_run(), project.open_run()
    for run, length in ((long_run, SAVE_EVERY + 100), (short_run, 20)):
        project.submit(run, CheckpointSaved(3, "file:///3"))
        project.post_observations(run, evals(*(step % 7 / 7 + step % 5 / 50 for step in range(length))))
    project.drop_monitor_state(long_run)
    project.drop_monitor_state(short_run)
    cold = replace(project, cache=RunCache())
    last = Observations(tuple(evals(0.9, start=10_000)))
    cold.submit_all([Message(project.id, run.id, last) for run in (long_run, short_run)])
    for run, length in ((long_run, SAVE_EVERY + 100), (short_run, 20)):
        reference = project.open_run()
        project.submit(reference, CheckpointSaved(3, "file:///3"))
        project.post_observations(reference, evals(*(step % 7 / 7 + step % 5 / 50 for step in range(length))))
        project.submit(reference, last)
        assert cold.cached_monitor(run) == project.cached_monitor(reference)
        assert cold.load_run(run).best_checkpoint == project.load_run(reference).best_checkpoint is not None


def test_state_shared_by_processes_is_saved(project: ProjectFixture) -> None:
    """A run whose posts are spread over two processes has its state saved as often as in one process."""
    run, other = project.open_run(), replace(project, cache=RunCache())
    for step in range(0, 2 * SAVE_EVERY, 256):
        (other if step % 512 else project).post_observations(
            run, evals(*(index % 7 / 7 for index in range(256)), start=step)
        )
    assert post_and_read_result(replace(project, cache=RunCache()), run, evals(0.5, start=2 * SAVE_EVERY)) == "restored"


def test_failed_commit_leaves_no_trace_in_the_cache(project: ProjectFixture) -> None:
    """A message that could not be committed is accepted again."""
    run = project.open_run()
    post_and_read_result(project, run, evals(0.1))
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE runs RENAME TO renamed_runs")
    with pytest.raises(Exception, match="runs"):
        project.post_observations(run, evals(0.2, start=1))
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE renamed_runs RENAME TO runs")
    assert project.post_observations(run, evals(0.2, start=1)).accepted == 1


def test_cache_evicts_the_least_recently_used_run(project: ProjectFixture) -> None:
    """A full cache drops the runs that were used longest ago."""
    runs = [project.open_run() for _ in range(3)]
    post_and_read_result(project, runs[0], evals(0.1))
    size = project.cached_state(runs[0]).size_bytes
    project = replace(project, cache=RunCache(max_bytes=2 * size + size // 2))
    assert [post_and_read_result(project, run, evals(0.1, start=1)) for run in runs] == ["rebuilt"] * 3
    assert 2 * size <= project.cache.bytes < 3 * size
    assert [post_and_read_result(project, run, evals(0.2, start=2)) for run in runs[1:]] == ["hit"] * 2
    assert post_and_read_result(project, runs[0], evals(0.2, start=2)) == "rebuilt"
    project.evict_run(runs[0])
    project.evict_run(runs[2])
    assert (len(project.cache), project.cache.bytes) == (0, 0)


def test_late_observation_is_replayed_from_a_monitor_before_it(project: ProjectFixture) -> None:
    """What an edit replays begins at the stored monitor; the next late observation finds one just before the last."""
    run = project.open_run(policy="default")
    project.post_observations(run, evals(*(step % 7 / 7 for step in range(500))))
    orders = []
    for late in (480, 490, 470):
        project.post_observations(run, [PostedObservation("proxy", late, 0.5)])
        with project.database.reading() as tx:
            stored = ingest.load_states(tx, [run.id])[run.id]
        monitor = state_from_json(project.cached_state(run).policy, stored.state)
        orders.append(monitor.last)
    assert [order and order[0] for order in orders] == [479, 489, 469]
    monitor_after = project.cached_monitor(run)
    rebuilt = replace(project, cache=RunCache())
    project.drop_monitor_state(run)
    post_and_read_result(rebuilt, run, [])
    assert rebuilt.cached_monitor(run) == monitor_after
