"""Guards that put stops on hold, computed from rows, and limits under concurrent decisions."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from functools import partial

from evalstop_service.decisions import guards, stale_runs, transitions
from evalstop_service.domain.decision_lifecycle import Guard
from evalstop_service.ingest import CheckpointSaved, Message, Observations, open_run
from evalstop_service.store import projects, run_details, runs, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.concurrency import run_concurrently
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, evals, set_up_project

MINUTE = timedelta(minutes=1)


def find_guards(project: ProjectFixture, run: Run, now: datetime = NOW) -> tuple[Guard, ...]:
    with project.database.transaction() as tx:
        return find_guards_in(tx, run, now)


def find_guards_in(tx: Transaction, run: Run, now: datetime) -> tuple[Guard, ...]:
    locked = runs.lock_run(tx, run.project_id, run.id)
    decision = transitions.begin_decision(locked, new_id(), now, locked.last_step or 0, locked.verdict)
    return guards.find_guards(tx, projects.lock_project(tx, run.project_id), locked, now, decision)


def find_guard_kinds(project: ProjectFixture, run: Run, now: datetime = NOW) -> list[str]:
    return [guard.kind for guard in find_guards(project, run, now)]


def open_run_despite(project: ProjectFixture, run_name: str, *despite: str) -> Run:
    """Open a run under a policy that stops despite these guards."""
    document = {"name": "despite", "members": [{"detector": "k_decline"}], "stops_despite": list(despite)}
    project.add_policy(document)
    return project.open_run(run_name, policy="despite")


def insert_decision(project: ProjectFixture, run: Run, state: str, due_at: datetime = NOW) -> None:
    """Insert a decision of the run."""
    with project.database.transaction() as tx:
        insert_decision_in(tx, run, state, due_at)


def insert_decision_in(tx: Transaction, run: Run, state: str, due_at: datetime) -> None:
    row = {"run_id": run.id, "id": new_id(), "project_id": run.project_id, "attempt": run.attempt, "state": state}
    row |= {"step": 4, "verdict": run.verdict, "policy_id": run.policy_id, "due_at": due_at, "created_at": due_at}
    row |= {"observed_probability": 0.1, "run_name": run.name}
    row |= {"policy_name": run.policy_name, "policy_version": run.policy_version}
    tx.execute(tables.decisions.insert().values(row))


def end_run(project: ProjectFixture, run: Run, status: str) -> None:
    """Set the run's status and end."""
    with project.database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(status=status, ended_at=NOW))


def test_healthy_run_has_no_guards(project: ProjectFixture) -> None:
    """A run that posts, in a project that is not paused, has no guards."""
    run = project.open_run()
    project.post_observations(run, evals(0.1, 0.2))
    assert find_guards(project, run) == ()


def test_paused_project_is_a_guard(project: ProjectFixture) -> None:
    """The guard says who paused the project and when."""
    project.change_settings(paused_at=NOW, paused_by="dana")
    (guard,) = find_guards(project, project.open_run())
    assert (guard.kind, guard.details) == ("paused", {"paused_at": "2026-01-01T12:00:00Z", "paused_by": "dana"})


def test_requested_stops_of_the_last_hour_are_counted(project: ProjectFixture) -> None:
    """Decisions that were recorded only, held, vetoed or moot do not count towards the limit."""
    for state in ("shadow", "held_out", "on_hold", "vetoed", "moot"):
        insert_decision(project, project.open_run(), state)
    project.change_settings(stops_per_hour=1, stops_share=None)
    run = project.open_run()
    assert find_guards(project, run, NOW + MINUTE) == ()
    for state in ("pending", "requested", "acknowledged", "escalated", "confirmed", "failed", "undone"):
        insert_decision(project, project.open_run(), state)
    (guard,) = find_guards(project, run, NOW + MINUTE)
    assert (guard.kind, guard.details) == ("stops_per_hour", {"stops": 7, "stops_per_hour": 1})


def test_stop_counts_for_an_hour_after_its_veto_window(project: ProjectFixture) -> None:
    """A stop counts for an hour from the end of its veto window; a pending one counts until then too."""
    project.change_settings(stops_per_hour=1, stops_share=None, stale_seconds=10**6)
    due_at = NOW + 600 * MINUTE
    insert_decision(project, project.open_run(), "requested", due_at)
    run = project.open_run()
    assert find_guard_kinds(project, run, NOW) == ["stops_per_hour"]
    assert find_guard_kinds(project, run, due_at + 59 * MINUTE) == ["stops_per_hour"]
    assert find_guard_kinds(project, run, due_at + 60 * MINUTE) == []
    insert_decision(project, project.open_run(), "pending", NOW)
    assert find_guard_kinds(project, run, due_at + 60 * MINUTE) == ["stops_per_hour"]


def test_limit_is_the_projects_own(project: ProjectFixture) -> None:
    """The limit per hour is read from the project, and None means no limit."""
    project.change_settings(stops_per_hour=2, stops_share=None)
    for _ in range(2):
        insert_decision(project, project.open_run(), "requested")
    run = project.open_run()
    assert find_guard_kinds(project, run) == ["stops_per_hour"]
    project.change_settings(stops_per_hour=3)
    assert find_guard_kinds(project, run) == []
    project.change_settings(stops_per_hour=None, stops_share=None)
    assert find_guard_kinds(project, run) == []


def test_decision_does_not_count_against_itself(project: ProjectFixture) -> None:
    """A pending stop that is checked again does not count towards its own limit."""
    project.change_settings(stops_per_hour=1)
    run = project.open_run()
    insert_decision(project, run, "pending")
    assert find_guard_kinds(project, run) == []


def test_share_of_stopped_runs_is_limited(database: Database) -> None:
    """The share is of running and recently stopped runs, and applies from ten stops or twenty runs on."""
    for others, ended, stopping, share, held in (
        (2, 0, 1, 0.5, False),  # 2 of 3: too few to limit
        (9, 0, 9, 0.5, False),  # the tenth stop
        (10, 0, 10, 0.5, True),
        (19, 0, 0, 0.01, False),  # one stop is always allowed
        (18, 1, 0, 0.1, False),  # 2 of 20, one of which has ended
        (18, 1, 1, 0.1, True),
        (21, 0, 1, 0.09, True),  # 2 of 22, and of 23 they would be allowed
        (10, 0, 10, 1.0, False),
        (10, 0, 10, None, False),
        (10, 0, 10, 5e-324, True),
    ):
        project = set_up_project(database)
        project.change_settings(stops_share=share, stops_per_hour=None)
        run = project.open_run()
        with database.transaction() as tx:
            stored = projects.get_project(tx, project.id)
            for number in range(others):
                other = open_run.create_run(tx, stored, open_run.OpenRequest(f"other {number}"), NOW)
                if number < stopping:
                    insert_decision_in(tx, other, "requested", NOW)
        for _ in range(ended):
            gone = project.open_run()
            insert_decision(project, gone, "confirmed")
            end_run(project, gone, "stopped")
        assert find_guard_kinds(project, run) == (["stops_share"] if held else [])
        if others == 18 and held:
            (guard,) = find_guards(project, run)
            assert guard.reason == "this stop would be 3 of 20 runs (15 %) in the last hour; the limit is 10 %"


def test_silent_run_is_not_stopped(project: ProjectFixture) -> None:
    """A stale run has a guard, unless its policy stops despite it; a heartbeat removes the guard.

    Silence that the monitor has not called stale, as right after the service was away, is none.
    """
    run, exempt = project.open_run(), open_run_despite(project, "bold", "stale", "no_checkpoint")
    later = NOW + timedelta(seconds=300)
    stale_runs.check_due_runs(project.database, later, available_since=later)
    assert find_guard_kinds(project, run, later) == []
    later += timedelta(seconds=300)
    stale_runs.check_due_runs(project.database, later)
    assert find_guard_kinds(project, run, later) == ["stale"]
    assert find_guard_kinds(project, exempt, later) == []
    with project.database.transaction() as tx:
        run_details.record_heartbeat(tx, run.id, run.project_id, NOW + timedelta(seconds=310))
    assert find_guard_kinds(project, run, later) == []


def test_lost_run_is_not_stopped(project: ProjectFixture) -> None:
    """A lost run has the guard `stale` at any time."""
    run = project.open_run()
    end_run(project, run, "lost")
    assert find_guard_kinds(project, run) == ["stale"]


def test_faulty_metric_is_a_guard(project: ProjectFixture) -> None:
    """An eval that ceased while others go on is a guard that names it."""
    run, exempt = project.open_run(), open_run_despite(project, "bold", "metric_fault", "no_checkpoint")
    for each in (run, exempt):
        project.post_observations(each, evals(0.5, 0.25))
        project.post_observations(each, [PostedObservation("kl", 100, 0.1)], NOW + timedelta(minutes=1))
    (guard,) = find_guards(project, run)
    (fault,) = guard.details["metric_faults"]
    assert (guard.kind, fault["metric"]) == ("metric_fault", "eval")
    assert find_guard_kinds(project, exempt) == []


def test_fault_of_an_unused_metric_is_no_guard(project: ProjectFixture) -> None:
    """The policy `paper` uses evals alone, so a proxy that ceased is a guard for `default` but not for it."""
    of_paper, of_default = project.open_run(policy="paper"), project.open_run(policy="default")
    for run in (of_paper, of_default):
        project.post_observations(run, [*evals(*(step / 7 for step in range(9))), PostedObservation("proxy", 0, 1.0)])
        project.post_observations(run, evals(1.3, start=20), NOW + timedelta(minutes=1))
    assert find_guard_kinds(project, of_paper) == []
    assert find_guard_kinds(project, of_default) == ["metric_fault", "no_checkpoint"]


def test_run_without_checkpoint_is_not_stopped(project: ProjectFixture) -> None:
    """Without a checkpoint that has an eval a run has a guard, except under the policy `paper`."""
    project.change_settings(stops_share=None)
    run, paper_run = project.open_run(policy="default"), project.open_run(policy="paper")
    for each in (run, paper_run):
        project.post_observations(each, DECLINING_EVALS)
    assert find_guard_kinds(project, run) == ["no_checkpoint"]
    assert find_guard_kinds(project, paper_run) == []
    project.submit(run, CheckpointSaved(1, "file:///1.pt"))
    assert find_guard_kinds(project, run) == []


def test_concurrent_decisions_respect_the_limit(postgres_database: Database) -> None:
    """The second decision waits until the first has committed, and then counts it."""
    project = set_up_project(postgres_database)
    project.change_settings(stops_per_hour=1, stops_share=None)
    first, second = project.open_run(), project.open_run()
    started, guard_kinds = threading.Event(), list[str]()

    def decide_second() -> None:
        with project.database.transaction() as tx:
            started.set()
            guard_kinds.extend(guard.kind for guard in find_guards_in(tx, second, NOW))

    thread = threading.Thread(target=decide_second)
    with project.database.transaction() as tx:
        assert find_guards_in(tx, first, NOW) == ()
        thread.start()
        started.wait(10)
        insert_decision_in(tx, first, "requested", NOW)
        assert thread.is_alive()
    thread.join(60)
    assert guard_kinds == ["stops_per_hour"]


def test_decisions_of_one_commit_respect_the_limit(project: ProjectFixture) -> None:
    """Each decision of a commit counts those made before it in the same transaction."""
    project.change_settings(stops_per_hour=3, stops_share=None)
    opened = [project.open_run() for _ in range(7)]
    project.submit_all([Message(project.id, run.id, Observations(tuple(DECLINING_EVALS))) for run in opened])
    assert sorted(project.load_decision(run).state for run in opened) == ["on_hold"] * 4 + ["requested"] * 3


def test_events_and_decisions_do_not_deadlock(postgres_database: Database) -> None:
    """Two transactions that each inserted an event and then lock the project do not deadlock."""
    project = set_up_project(postgres_database)
    added, results = threading.Barrier(2, timeout=10), list[tuple[Guard, ...]]()

    def add_event_and_find_guards(run: Run) -> None:
        with project.database.transaction() as tx:
            event = {"run_id": run.id, "id": new_id(), "project_id": run.project_id, "type": "run.suspected"}
            tx.execute(tables.events.insert().values(event | {"body": "{}", "created_at": NOW}))
            added.wait()
            results.append(find_guards_in(tx, run, NOW))

    assert run_concurrently(*(partial(add_event_and_find_guards, project.open_run()) for _ in range(2))) == []
    assert results == [(), ()]
