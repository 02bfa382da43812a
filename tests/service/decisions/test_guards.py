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

from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, evals, set_up_project, submit_message

MINUTE = timedelta(minutes=1)


def holding(project: ProjectFixture, run: Run, now: datetime = NOW) -> tuple[Guard, ...]:
    with project.database.transaction() as tx:
        return _holding(tx, run, now)


def _holding(tx: Transaction, run: Run, now: datetime) -> tuple[Guard, ...]:
    locked = runs.lock_run(tx, run.project_id, run.id)
    assert locked is not None
    return guards.find_guards(tx, projects.lock_project(tx, run.project_id), locked, now)


def kinds(project: ProjectFixture, run: Run, now: datetime = NOW) -> list[str]:
    return [guard.kind for guard in holding(project, run, now)]


def settle(project: ProjectFixture, **settings: Any) -> None:
    """Change the project."""
    with project.database.transaction() as tx:
        projects.update_project(tx, replace(projects.lock_project(tx, project.id), **settings))


def lift(project: ProjectFixture, run_name: str, *despite: str) -> Run:
    """A run under a policy that stops despite these reservations."""
    document = {"name": "bold", "members": [{"detector": "k_decline"}], "stops_despite": list(despite)}
    with project.database.transaction() as tx:
        policies.add_policy(tx, projects.get_project(tx, project.id), "bold", document, NOW)
    return project.open_run(run_name, policy="bold")


def decide(project: ProjectFixture, run: Run, state: str, due_at: datetime = NOW) -> None:
    """Put a decision on record."""
    with project.database.transaction() as tx:
        _decide(tx, run, state, due_at)


def _decide(tx: Transaction, run: Run, state: str, due_at: datetime) -> None:
    row = {"run_id": run.id, "id": new_id(), "project_id": run.project_id, "attempt": run.attempt, "state": state}
    row |= {"step": 4, "verdict": run.verdict, "policy_id": run.policy_id, "due_at": due_at, "created_at": due_at}
    row |= {"observed_probability": 0.1}
    tx.execute(tables.decisions.insert().values(row))


def end(project: ProjectFixture, run: Run, status: str) -> None:
    """Let a run have ended."""
    with project.database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(status=status, ended_at=NOW))


def test_a_policy_of_a_later_release_stops_despite_nothing(project: ProjectFixture) -> None:
    """What cannot be read allows nothing: after a way back to this release every guard holds that can be told."""
    run = lift(project, "one", "stale", "no_checkpoint")
    project.post_observations(run, evals(0.1, 0.2))
    assert kinds(project, run, NOW + MINUTE * 60) == []
    with project.database.transaction() as tx:
        of_it = tables.policies.c.id == run.policy_id
        tx.execute(tables.policies.update().where(of_it).values(document={"name": "from another release"}))
    assert kinds(project, run, NOW + MINUTE * 60) == ["stale", "no_checkpoint"]


def test_a_healthy_run_of_a_project_that_is_not_paused_may_be_stopped(project: ProjectFixture) -> None:
    """Nothing speaks against it."""
    run = project.open_run()
    project.post_observations(run, evals(0.1, 0.2))
    assert holding(project, run) == ()


def test_a_paused_project_holds_everything(project: ProjectFixture) -> None:
    """The guard says who paused it and since when."""
    settle(project, paused_at=NOW, paused_by="dana")
    (guard,) = holding(project, project.open_run())
    assert (guard.kind, guard.details) == ("paused", {"paused_at": "2026-01-01T12:00:00Z", "paused_by": "dana"})


def test_stops_that_were_handed_out_within_the_hour_are_counted(project: ProjectFixture) -> None:
    """What was only recorded, on_hold, vetoed or overtaken stopped nobody."""
    for state in ("shadow", "held_out", "on_hold", "vetoed", "moot"):
        decide(project, project.open_run(), state)
    settle(project, stops_per_hour=1, stops_share=None)
    run = project.open_run()
    assert holding(project, run, NOW + MINUTE) == ()
    for state in ("pending", "requested", "acknowledged", "escalated", "confirmed", "failed", "undone"):
        decide(project, project.open_run(), state)
    (guard,) = holding(project, run, NOW + MINUTE)
    assert (guard.kind, guard.details) == ("stops_per_hour", {"stops": 7, "stops_per_hour": 1})


def test_a_stop_is_counted_for_an_hour_from_the_end_of_its_grace_period(project: ProjectFixture) -> None:
    """One that is pending counts however long it has to wait."""
    settle(project, stops_per_hour=1, stops_share=None, stale_seconds=10**6)
    due_at = NOW + 600 * MINUTE
    decide(project, project.open_run(), "requested", due_at)
    run = project.open_run()
    assert kinds(project, run, NOW) == ["stops_per_hour"]
    assert kinds(project, run, due_at + 59 * MINUTE) == ["stops_per_hour"]
    assert kinds(project, run, due_at + 60 * MINUTE) == []
    decide(project, project.open_run(), "pending", NOW)
    assert kinds(project, run, due_at + 60 * MINUTE) == ["stops_per_hour"]


def test_the_bound_is_the_projects_own(project: ProjectFixture) -> None:
    """Stops of other projects do not count, and without a bound there is none."""
    settle(project, stops_per_hour=2, stops_share=None)
    for _ in range(2):
        decide(project, project.open_run(), "requested")
    run = project.open_run()
    assert kinds(project, run) == ["stops_per_hour"]
    settle(project, stops_per_hour=3)
    assert kinds(project, run) == []
    settle(project, stops_per_hour=None)
    assert kinds(project, run) == []


def test_a_decision_does_not_count_against_itself(project: ProjectFixture) -> None:
    """A pending stop that is looked at again has not used up its own place."""
    settle(project, stops_per_hour=1)
    run = project.open_run()
    decide(project, run, "pending")
    assert kinds(project, run) == []


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
        project = set_up_project(database)
        settle(project, stops_share=share, stops_per_hour=None)
        run = project.open_run()
        for number in range(others):
            other = project.open_run()
            if number < stopping:
                decide(project, other, "requested")
        for _ in range(ended):
            gone = project.open_run()
            decide(project, gone, "confirmed")
            end(project, gone, "stopped")
        assert kinds(project, run) == (["stops_share"] if held else [])
        if others == 18 and held:
            (guard,) = holding(project, run)
            assert guard.reason == "this stop would be 3 of 20 runs (15 %) in the last hour; the limit is 10 %"


def test_a_silent_run_is_not_stopped(project: ProjectFixture) -> None:
    """Its metrics may not be what they were; a heartbeat shows that it is there, and the policy may not care."""
    run, bold = project.open_run(), lift(project, "bold", "stale", "no_checkpoint")
    later = NOW + timedelta(seconds=300)
    assert kinds(project, run, later - timedelta(seconds=1)) == []
    assert kinds(project, run, later) == ["stale"]
    assert kinds(project, bold, later) == []
    with project.database.transaction() as tx:
        run_health.record_heartbeat(tx, run.id, run.project_id, NOW + timedelta(seconds=10))
    assert kinds(project, run, later) == []


def test_a_lost_run_is_not_stopped(project: ProjectFixture) -> None:
    """Whatever the time is."""
    run = project.open_run()
    end(project, run, "lost")
    assert kinds(project, run) == ["stale"]


def test_a_metric_without_data_stops_nobody(project: ProjectFixture) -> None:
    """An eval that says the same eight times holds the stop back, and the guard names the metric and why."""
    run, bold = project.open_run(), lift(project, "bold", "metric_fault", "no_checkpoint")
    for one in (run, bold):
        project.post_observations(one, evals(0.5, *[0.25] * 8))
    (guard,) = holding(project, run)
    (fault,) = guard.details["metric_faults"]
    assert (guard.kind, fault["metric"], fault["kind"]) == ("metric_fault", "eval", "constant")
    assert kinds(project, bold) == []


def test_only_metrics_that_may_stop_the_run_count(project: ProjectFixture) -> None:
    """The paper's rule looks at gold alone: a proxy that is stuck does not matter to it, but to `default` it does."""
    proxies = [PostedObservation("proxy", step, 1.0) for step in range(9)]
    of_paper, of_default = project.open_run(policy="paper"), project.open_run(policy="default")
    for run in (of_paper, of_default):
        project.post_observations(run, [*evals(*(i / 7 for i in range(9))), *proxies])
    assert kinds(project, of_paper) == []
    assert kinds(project, of_default) == ["metric_fault", "no_checkpoint"]


def test_a_run_that_would_leave_nothing_is_not_stopped(project: ProjectFixture) -> None:
    """Until a checkpoint with an eval is registered; the published rule does not ask for one."""
    settle(project, stops_share=None)
    run, published = project.open_run(policy="default"), project.open_run(policy="paper")
    for one in (run, published):
        project.post_observations(one, DECLINING_EVALS)
    assert kinds(project, run) == ["no_checkpoint"]
    assert kinds(project, published) == []
    project.submit(run, CheckpointSaved(1, "file:///1.pt"))
    assert kinds(project, run) == []


def test_two_stops_at_one_moment_do_not_both_pass(postgres_database: Database) -> None:
    """The second waits for the first to commit, and then counts it."""
    project = set_up_project(postgres_database)
    settle(project, stops_per_hour=1, stops_share=None)
    first, second = project.open_run(), project.open_run()
    counted, held = threading.Event(), list[str]()

    def decide_second() -> None:
        with project.database.transaction() as tx:
            counted.set()
            held.extend(guard.kind for guard in _holding(tx, second, NOW))

    thread = threading.Thread(target=decide_second)
    with project.database.transaction() as tx:
        assert _holding(tx, first, NOW) == ()
        thread.start()
        counted.wait(10)
        _decide(tx, first, "requested", NOW)
        assert thread.is_alive()
    thread.join(10)
    assert held == ["stops_per_hour"]


def test_of_many_runs_that_fall_in_one_commit_the_bound_lets_some_through(project: ProjectFixture) -> None:
    """Each decision sees those that were made before it in the same transaction."""
    settle(project, stops_per_hour=3, stops_share=None)
    found = [project.open_run() for _ in range(7)]
    project.submit_all([Message(project.id, run.id, Observations(tuple(DECLINING_EVALS))) for run in found])
    assert sorted(state_of(project, run) for run in found) == ["on_hold"] * 4 + ["requested"] * 3


def test_of_many_runs_that_fall_at_one_moment_the_bound_lets_some_through(postgres_database: Database) -> None:
    """Six processes take in what makes twelve runs stop, and none of them slips past it."""
    project = set_up_project(postgres_database)
    settle(project, stops_per_hour=3, stops_share=None)
    found = [project.open_run() for _ in range(12)]
    ready = threading.Barrier(6, timeout=30)

    def post(of_a_process: list[Run]) -> None:
        ready.wait()
        for run in of_a_process:
            submit_message(postgres_database, project.id, run.id, Observations(tuple(DECLINING_EVALS)), NOW)

    threads = [threading.Thread(target=post, args=(found[number::6],)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(state_of(project, run) for run in found) == ["on_hold"] * 9 + ["requested"] * 3


def state_of(project: ProjectFixture, run: Run) -> str:
    decision = project.find_decision(run)
    assert decision is not None
    return decision.state


def test_who_has_announced_something_can_still_come_to_a_decision(postgres_database: Database) -> None:
    """Two transactions that have each added a row of the project, and then want its lock, do not wait in a ring."""
    project = set_up_project(postgres_database)
    added, results = threading.Barrier(2, timeout=10), list[tuple[Guard, ...]]()

    def announce_and_decide(run: Run) -> None:
        with project.database.transaction() as tx:
            event = {"run_id": run.id, "id": new_id(), "project_id": run.project_id, "type": "run.suspected"}
            tx.execute(tables.events.insert().values(event | {"body": "{}", "created_at": NOW}))
            added.wait()
            results.append(_holding(tx, run, NOW))

    threads = [threading.Thread(target=announce_and_decide, args=(project.open_run(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [(), ()]
