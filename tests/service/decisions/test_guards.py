"""What holds a stop back, told from rows; and two stops at one moment, of which the bound lets one through."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from evalstop_service.decisions import guards
from evalstop_service.ingest import CheckpointSaved, Message, Observations
from evalstop_service.rules.decision_lifecycle import Guard
from evalstop_service.store import policies, projects, run_health, runs, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.scenes import FALLING, NOW, Scene, evals, set_up, take

MINUTE = timedelta(minutes=1)


def holding(scene: Scene, run: Run, now: datetime = NOW) -> tuple[Guard, ...]:
    with scene.database.transaction() as tx:
        return _holding(tx, run, now)


def _holding(tx: Transaction, run: Run, now: datetime) -> tuple[Guard, ...]:
    locked = runs.lock_run(tx, run.project_id, run.id)
    assert locked is not None
    return guards.find_guards(tx, projects.lock_project(tx, run.project_id), locked, now)


def kinds(scene: Scene, run: Run, now: datetime = NOW) -> list[str]:
    return [guard.kind for guard in holding(scene, run, now)]


def settle(scene: Scene, **settings: Any) -> None:
    """Change the project."""
    with scene.database.transaction() as tx:
        projects.update_project(tx, replace(projects.lock_project(tx, scene.project_id), **settings))


def lift(scene: Scene, run_name: str, *despite: str) -> Run:
    """A run under a policy that stops despite these reservations."""
    document = {"name": "bold", "members": [{"detector": "k_decline"}], "stops_despite": list(despite)}
    with scene.database.transaction() as tx:
        policies.add_policy(tx, projects.get_project(tx, scene.project_id), "bold", document, NOW)
    return scene.open(run_name, policy="bold")


def decide(scene: Scene, run: Run, state: str, due_at: datetime = NOW) -> None:
    """Put a decision on record."""
    with scene.database.transaction() as tx:
        _decide(tx, run, state, due_at)


def _decide(tx: Transaction, run: Run, state: str, due_at: datetime) -> None:
    row = {"run_id": run.id, "id": new_id(), "project_id": run.project_id, "attempt": run.attempt, "state": state}
    row |= {"step": 4, "verdict": run.verdict, "policy_id": run.policy_id, "due_at": due_at, "created_at": due_at}
    row |= {"observed_probability": 0.1}
    tx.execute(tables.decisions.insert().values(row))


def end(scene: Scene, run: Run, status: str) -> None:
    """Let a run have ended."""
    with scene.database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(status=status, ended_at=NOW))


def test_a_policy_of_a_later_release_stops_despite_nothing(scene: Scene) -> None:
    """What cannot be read allows nothing: after a way back to this release every guard holds that can be told."""
    run = lift(scene, "one", "stale", "no_checkpoint")
    scene.post(run, evals(0.1, 0.2))
    assert kinds(scene, run, NOW + MINUTE * 60) == []
    with scene.database.transaction() as tx:
        of_it = tables.policies.c.id == run.policy_id
        tx.execute(tables.policies.update().where(of_it).values(document={"name": "from another release"}))
    assert kinds(scene, run, NOW + MINUTE * 60) == ["stale", "no_checkpoint"]


def test_a_healthy_run_of_a_project_that_is_not_paused_may_be_stopped(scene: Scene) -> None:
    """Nothing speaks against it."""
    run = scene.open()
    scene.post(run, evals(0.1, 0.2))
    assert holding(scene, run) == ()


def test_a_paused_project_holds_everything(scene: Scene) -> None:
    """The guard says who paused it and since when."""
    settle(scene, paused_at=NOW, paused_by="dana")
    (guard,) = holding(scene, scene.open())
    assert (guard.kind, guard.details) == ("paused", {"paused_at": "2026-01-01T12:00:00Z", "paused_by": "dana"})


def test_stops_that_were_handed_out_within_the_hour_are_counted(scene: Scene) -> None:
    """What was only recorded, on_hold, vetoed or overtaken stopped nobody."""
    for state in ("shadow", "held_out", "on_hold", "vetoed", "moot"):
        decide(scene, scene.open(), state)
    settle(scene, stops_per_hour=1, stops_share=None)
    run = scene.open()
    assert holding(scene, run, NOW + MINUTE) == ()
    for state in ("pending", "requested", "acknowledged", "escalated", "confirmed", "failed", "undone"):
        decide(scene, scene.open(), state)
    (guard,) = holding(scene, run, NOW + MINUTE)
    assert (guard.kind, guard.details) == ("stops_per_hour", {"stops": 7, "stops_per_hour": 1})


def test_a_stop_is_counted_for_an_hour_from_the_end_of_its_grace_period(scene: Scene) -> None:
    """One that is pending counts however long it has to wait."""
    settle(scene, stops_per_hour=1, stops_share=None, stale_seconds=10**6)
    due_at = NOW + 600 * MINUTE
    decide(scene, scene.open(), "requested", due_at)
    run = scene.open()
    assert kinds(scene, run, NOW) == ["stops_per_hour"]
    assert kinds(scene, run, due_at + 59 * MINUTE) == ["stops_per_hour"]
    assert kinds(scene, run, due_at + 60 * MINUTE) == []
    decide(scene, scene.open(), "pending", NOW)
    assert kinds(scene, run, due_at + 60 * MINUTE) == ["stops_per_hour"]


def test_the_bound_is_the_projects_own(scene: Scene) -> None:
    """Stops of other projects do not count, and without a bound there is none."""
    settle(scene, stops_per_hour=2, stops_share=None)
    for _ in range(2):
        decide(scene, scene.open(), "requested")
    run = scene.open()
    assert kinds(scene, run) == ["stops_per_hour"]
    settle(scene, stops_per_hour=3)
    assert kinds(scene, run) == []
    settle(scene, stops_per_hour=None)
    assert kinds(scene, run) == []


def test_a_decision_does_not_count_against_itself(scene: Scene) -> None:
    """A pending stop that is looked at again has not used up its own place."""
    settle(scene, stops_per_hour=1)
    run = scene.open()
    decide(scene, run, "pending")
    assert kinds(scene, run) == []


def test_at_most_a_share_of_the_runs_is_stopped_within_an_hour(database: Database) -> None:
    """Of the runs that run and those that were stopped within the hour, from ten stops or twenty runs on."""
    for others, ended, stopping, share, held in (
        (2, 0, 1, 0.5, False),  # two of three
        (9, 0, 9, 0.5, False),  # the tenth
        (10, 0, 10, 0.5, True),
        (19, 0, 0, 0.01, False),  # one is always allowed
        (18, 1, 0, 0.1, False),  # two of twenty, one of them gone by now
        (18, 1, 1, 0.1, True),
        (10, 0, 10, 1.0, False),
        (10, 0, 10, None, False),
    ):
        scene = set_up(database)
        settle(scene, stops_share=share, stops_per_hour=None)
        run = scene.open()
        for number in range(others):
            other = scene.open()
            if number < stopping:
                decide(scene, other, "requested")
        for _ in range(ended):
            gone = scene.open()
            decide(scene, gone, "confirmed")
            end(scene, gone, "stopped")
        assert kinds(scene, run) == (["stops_share"] if held else [])
        if others == 18 and held:
            (guard,) = holding(scene, run)
            assert guard.reason == "this stop would be 3 of 20 runs (15 %) in the last hour; the limit is 10 %"


def test_a_silent_run_is_not_stopped(scene: Scene) -> None:
    """Its metrics may not be what they were; a heartbeat shows that it is there, and the policy may not care."""
    run, bold = scene.open(), lift(scene, "bold", "stale", "no_checkpoint")
    later = NOW + timedelta(seconds=300)
    assert kinds(scene, run, later - timedelta(seconds=1)) == []
    assert kinds(scene, run, later) == ["stale"]
    assert kinds(scene, bold, later) == []
    with scene.database.transaction() as tx:
        run_health.record_heartbeat(tx, run.id, run.project_id, NOW + timedelta(seconds=10))
    assert kinds(scene, run, later) == []


def test_a_lost_run_is_not_stopped(scene: Scene) -> None:
    """Whatever the time is."""
    run = scene.open()
    end(scene, run, "lost")
    assert kinds(scene, run) == ["stale"]


def test_a_metric_without_data_stops_nobody(scene: Scene) -> None:
    """An eval that says the same eight times holds the stop back, and the guard names the metric and why."""
    run, bold = scene.open(), lift(scene, "bold", "metric_fault", "no_checkpoint")
    for one in (run, bold):
        scene.post(one, evals(0.5, *[0.25] * 8))
    (guard,) = holding(scene, run)
    (fault,) = guard.details["metric_faults"]
    assert (guard.kind, fault["metric"], fault["kind"]) == ("metric_fault", "eval", "constant")
    assert kinds(scene, bold) == []


def test_only_metrics_that_may_stop_the_run_count(scene: Scene) -> None:
    """The paper's rule looks at gold alone: a proxy that is stuck does not matter to it, but to `default` it does."""
    proxies = [PostedObservation("proxy", step, 1.0) for step in range(9)]
    of_paper, of_default = scene.open(policy="paper"), scene.open(policy="default")
    for run in (of_paper, of_default):
        scene.post(run, [*evals(*(i / 7 for i in range(9))), *proxies])
    assert kinds(scene, of_paper) == []
    assert kinds(scene, of_default) == ["metric_fault", "no_checkpoint"]


def test_a_run_that_would_leave_nothing_is_not_stopped(scene: Scene) -> None:
    """Until a checkpoint with an eval is registered; the published rule does not ask for one."""
    settle(scene, stops_share=None)
    run, published = scene.open(policy="default"), scene.open(policy="paper")
    for one in (run, published):
        scene.post(one, FALLING)
    assert kinds(scene, run) == ["no_checkpoint"]
    assert kinds(scene, published) == []
    scene.take(run, CheckpointSaved(1, "file:///1.pt"))
    assert kinds(scene, run) == []


def test_two_stops_at_one_moment_do_not_both_pass(postgres_database: Database) -> None:
    """The second waits for the first to commit, and then counts it."""
    scene = set_up(postgres_database)
    settle(scene, stops_per_hour=1, stops_share=None)
    first, second = scene.open(), scene.open()
    counted, held = threading.Event(), list[str]()

    def decide_second() -> None:
        with scene.database.transaction() as tx:
            counted.set()
            held.extend(guard.kind for guard in _holding(tx, second, NOW))

    thread = threading.Thread(target=decide_second)
    with scene.database.transaction() as tx:
        assert _holding(tx, first, NOW) == ()
        thread.start()
        counted.wait(10)
        _decide(tx, first, "requested", NOW)
        assert thread.is_alive()
    thread.join(10)
    assert held == ["stops_per_hour"]


def test_of_many_runs_that_fall_in_one_commit_the_bound_lets_some_through(scene: Scene) -> None:
    """Each decision sees those that were made before it in the same transaction."""
    settle(scene, stops_per_hour=3, stops_share=None)
    found = [scene.open() for _ in range(7)]
    scene.take_all([Message(scene.project_id, run.id, Observations(tuple(FALLING))) for run in found])
    assert sorted(state_of(scene, run) for run in found) == ["on_hold"] * 4 + ["requested"] * 3


def test_of_many_runs_that_fall_at_one_moment_the_bound_lets_some_through(postgres_database: Database) -> None:
    """Six processes take in what makes twelve runs stop, and none of them slips past it."""
    scene = set_up(postgres_database)
    settle(scene, stops_per_hour=3, stops_share=None)
    found = [scene.open() for _ in range(12)]
    ready = threading.Barrier(6, timeout=30)

    def post(of_a_process: list[Run]) -> None:
        ready.wait()
        for run in of_a_process:
            take(postgres_database, scene.project_id, run.id, Observations(tuple(FALLING)), NOW)

    threads = [threading.Thread(target=post, args=(found[number::6],)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(state_of(scene, run) for run in found) == ["on_hold"] * 9 + ["requested"] * 3


def state_of(scene: Scene, run: Run) -> str:
    decision = scene.decision(run)
    assert decision is not None
    return decision.state


def test_who_has_announced_something_can_still_come_to_a_decision(postgres_database: Database) -> None:
    """Two transactions that have each added a row of the project, and then want its lock, do not wait in a ring."""
    scene = set_up(postgres_database)
    added, results = threading.Barrier(2, timeout=10), list[tuple[Guard, ...]]()

    def announce_and_decide(run: Run) -> None:
        with scene.database.transaction() as tx:
            event = {"run_id": run.id, "id": new_id(), "project_id": run.project_id, "type": "run.suspected"}
            tx.execute(tables.events.insert().values(event | {"body": "{}", "created_at": NOW}))
            added.wait()
            results.append(_holding(tx, run, NOW))

    threads = [threading.Thread(target=announce_and_decide, args=(scene.open(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [(), ()]
