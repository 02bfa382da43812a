"""Runs that fall silent are found, told of once, and taken for alive again as soon as they are heard of."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from evalstop_service.decisions import commands, pause, stale_runs, transitions
from evalstop_service.ingest import CheckpointSaved, Resumed, open_run
from evalstop_service.store import run_health, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_health import RunHealth
from evalstop_service.store.runs import Run

from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, evals, set_up_project


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def look(project: ProjectFixture, now: datetime) -> int:
    """Look until nothing is due."""
    count = 0
    while found := stale_runs.check_due_runs(project.database, now):
        count += found
    return count


def pulse(project: ProjectFixture, run: Run) -> RunHealth:
    with project.database.reading() as tx:
        return run_health.load_health(tx, [run.id])[run.id]


def told(project: ProjectFixture, run: Run) -> list[str]:
    """The types of a run's events about its pulse, in their order."""
    types = [row["type"] for row in project.load_rows(tables.events, run)]
    return [one for one in types if one in ("run.stale", "run.lost", "run.metric_fault")]


def data(project: ProjectFixture, run: Run, event_type: str) -> dict[str, Any]:
    (event,) = project.load_events(run, event_type)
    found: dict[str, Any] = json.loads(event["body"])["data"]
    return found


def test_a_run_is_not_looked_at_before_it_could_be_stale(project: ProjectFixture) -> None:
    """A look falls on the moment at which silence would be too long, however often the run posts meanwhile."""
    run = project.open_run()
    project.post_observations(run, evals(0.5), at(200))
    assert look(project, at(299)) == 0
    assert look(project, at(300)) == 1
    assert (pulse(project, run).state, pulse(project, run).next_check_at) == ("alive", at(500))


def test_a_silent_run_is_stale_then_lost_and_each_is_told_once(project: ProjectFixture) -> None:
    """At the default after five minutes and after an hour; then it has ended and nobody looks any more."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    for seconds in range(300, 5000, 60):
        look(project, at(seconds))
        expected = ["run.stale"] if seconds < 3600 else ["run.stale", "run.lost"]
        assert told(project, run) == expected, seconds
    found = project.load_run(run)
    assert (found.status, found.ended_at, pulse(project, run).next_check_at) == ("lost", at(3600), None)
    assert data(project, run, "run.stale")["health"] == {
        "state": "stale",
        "last_seen_at": "2026-01-01T12:00:00Z",
        "cadence_seconds": None,
    }


def test_a_service_that_heard_nobody_loses_no_run(project: ProjectFixture) -> None:
    """After a day without a look a run is stale at first: it has to stay silent while it is looked at."""
    run = project.open_run()
    assert look(project, at(86_400)) == 1
    assert (project.load_run(run).status, told(project, run)) == ("running", ["run.stale"])


def test_a_stale_run_that_posts_is_alive_and_may_turn_stale_again(project: ProjectFixture) -> None:
    """It is told each time."""
    run = project.open_run()
    look(project, at(300))
    project.post_observations(run, evals(0.5), at(400))
    look(project, at(600))
    assert pulse(project, run).state == "alive"
    look(project, at(700))
    assert told(project, run) == ["run.stale", "run.stale"]


def test_a_slow_run_is_measured_by_its_own_pace(project: ProjectFixture) -> None:
    """One eval in twenty minutes is no silence, three times as long is."""
    run = project.open_run()
    for number in range(6):
        project.post_observations(run, evals(number / 7, start=number), at(1200 * number))
    look(project, at(6000 + 3599))
    assert told(project, run) == []
    assert pulse(project, run).cadence_seconds == 1200
    look(project, at(6000 + 3600))
    assert told(project, run) == ["run.stale"]


def test_a_heartbeat_is_a_sign_of_life(project: ProjectFixture) -> None:
    """A long eval is not silence, for a run that says so."""
    run = project.open_run()
    for seconds in range(0, 7200, 60):
        open_run.record_heartbeat(project.database, project.id, run.id, at(seconds))
        look(project, at(seconds))
    assert (told(project, run), project.load_run(run).status) == ([], "running")


def test_a_lost_run_lives_again_when_it_is_heard_of(project: ProjectFixture) -> None:
    """By a post, a heartbeat, a resumption or being opened; and it can be lost again."""

    def resume(run: Run, now: datetime) -> None:
        project.submit(run, Resumed(0), now)

    ways: tuple[Callable[[Run, datetime], object], ...] = (
        lambda run, now: project.post_observations(run, evals(0.7, start=9), now),
        lambda run, now: open_run.record_heartbeat(project.database, project.id, run.id, now),
        resume,
        lambda run, now: open_run.open_run(
            project.database, project.id, open_run.OpenRequest(run.name, resume=open_run.Resume.ALLOW), now
        ),
        lambda run, now: project.submit(run, CheckpointSaved(0, "file:///0.pt"), now),
    )
    for number, way in enumerate(ways):
        start = 10_000 * number
        run = open_run.open_run(project.database, project.id, open_run.OpenRequest(f"run-{number}"), at(start))[0]
        project.post_observations(run, evals(0.5), at(start))
        look(project, at(start + 300))
        look(project, at(start + 3600))
        assert project.load_run(run).status == "lost"
        way(run, at(start + 5000))
        found = project.load_run(run)
        assert (found.status, found.ended_at, found.turn) == ("running", None, None)
        look(project, at(start + 5000))
        look(project, at(start + 5300))
        assert told(project, run) == ["run.stale", "run.lost", "run.stale"]


def test_a_run_that_has_ended_is_not_looked_at(project: ProjectFixture) -> None:
    """Nor does a heartbeat that comes late wake it."""
    run = project.open_run()
    commands.finish_run(project.database, project.id, run.id, "completed", at(10))
    open_run.record_heartbeat(project.database, project.id, run.id, at(20))
    assert look(project, at(300)) == 1
    assert look(project, at(10**6)) == 0
    assert (told(project, run), project.load_run(run).status) == ([], "completed")


def test_a_trainer_may_say_how_a_lost_run_ended(project: ProjectFixture) -> None:
    """Its word is better than none."""
    run = project.open_run()
    look(project, at(300))
    look(project, at(3600))
    assert commands.finish_run(project.database, project.id, run.id, "failed", at(4000)).status == "failed"


def test_a_pending_stop_of_a_run_that_falls_silent_is_on_hold(database: Database) -> None:
    """Its metrics may not be what they were; when it is heard of again the stop is taken up, and lost it is moot."""
    project = set_up_project(database, veto_window_seconds=3600)
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS)
    look(project, at(300))
    decision = project.find_decision(run)
    assert decision is not None
    assert decision.state == "on_hold"
    look(project, at(3600))
    lost = project.find_decision(run)
    assert lost is not None
    assert lost.state == "moot"


def test_a_metric_without_data_is_told_once(project: ProjectFixture) -> None:
    """Again only when it has been well in between, or has no data in another way."""
    run = project.open_run()
    project.post_observations(run, evals(0.5, *[0.25] * 8), at(100))
    look(project, at(300))
    project.post_observations(run, evals(0.25, start=20), at(350))
    look(project, at(600))
    assert told(project, run) == ["run.metric_fault"]
    assert data(project, run, "run.metric_fault")["metric_fault"]["kind"] == "constant"
    assert [one.metric for one in pulse(project, run).metric_faults] == ["eval"]
    project.post_observations(run, evals(0.3, start=30), at(601))
    look(project, at(900))
    assert pulse(project, run).metric_faults == ()
    project.post_observations(run, [PostedObservation("eval", 40 + step, float("nan")) for step in range(3)], at(901))
    look(project, at(1200))
    assert told(project, run) == ["run.metric_fault"] * 2


def test_a_policy_that_cannot_be_read_does_not_end_the_vigil(project: ProjectFixture) -> None:
    """Its runs are told to be silent as all others are."""
    broken, other = project.open_run(policy="watch-all-roles"), project.open_run()
    with project.database.transaction() as tx:
        of_it = tables.policies.c.id == broken.policy_id
        tx.execute(tables.policies.update().where(of_it).values(document={"name": "from another release"}))
    look(project, at(300))
    assert told(project, broken) == told(project, other) == ["run.stale"]


def test_many_processes_tell_each_thing_once(postgres_database: Database) -> None:
    """Four look at some hundred silent runs at one time."""
    project = set_up_project(postgres_database)
    found = [project.open_run() for _ in range(250)]
    threads = [threading.Thread(target=look, args=(project, at(300))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [told(project, run) for run in found] == [["run.stale"]] * len(found)


def test_a_pause_is_answered_when_no_pending_stop_is_left(database: Database) -> None:
    """What is pending is on hold by then, with who paused and why; another project goes on. Twice is harmless."""
    project, other = set_up_project(database, veto_window_seconds=60), set_up_project(database, veto_window_seconds=60)
    three = [project.open_run() for _ in range(3)]
    with database.transaction() as tx:
        tx.execute(tables.projects.update().values(stops_share=None))
    for run in (*three, elsewhere := other.open_run()):
        (other if run is elsewhere else project).post_observations(run, DECLINING_EVALS)
    assert {decision.state for run in three if (decision := project.find_decision(run))} == {"pending"}
    for actor in ("dana", "eli"):
        project_row = pause.pause_project(database, project.id, actor, "the eval set is broken", at(10))
        assert (project_row.paused_by, project_row.paused_reason) == ("dana", "the eval set is broken")
        assert {decision.state for run in three if (decision := project.find_decision(run))} == {"on_hold"}
    late = project.open_run()
    project.post_observations(late, DECLINING_EVALS)
    (event,) = project.load_events(late, "run.stop_on_hold")
    assert "dana: the eval set is broken" in event["body"]
    decision = other.find_decision(elsewhere)
    assert decision is not None
    assert decision.state == "pending"
    assert pause.resume_project(database, project.id, "dana", at(20)).paused_at is None


def test_a_stop_that_is_being_decided_does_not_slip_past_a_pause(postgres_database: Database) -> None:
    """The pause waits for the decision under way, and withholds it before it answers."""
    project = set_up_project(postgres_database, veto_window_seconds=60)
    run = project.open_run()
    with postgres_database.transaction() as tx:
        locked = runs.lock_run(tx, project.id, run.id)
        assert locked is not None
        decision = transitions.create_decision(tx, locked, 4, NOW)
        thread = threading.Thread(target=pause.pause_project, args=(postgres_database, project.id, "dana", "", NOW))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(30)
    found = project.find_decision(run)
    assert found is not None
    assert (decision.state, found.state) == ("pending", "on_hold")
