"""Silent runs become stale, then lost, with one event each, and alive again with their next message."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import pause, stale_runs, transitions
from evalstop_service.ingest import CheckpointSaved, Resumed, open_run
from evalstop_service.store import projects, run_details, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_details import RunHealth
from evalstop_service.store.runs import Run

from tests.service.concurrency import run_concurrently
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, evals, set_up_project

HEALTH_EVENTS = ("run.stale", "run.lost", "run.metric_fault")


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def check_until_done(project: ProjectFixture, now: datetime) -> int:
    """Check due runs until none is left; return how many were checked."""
    count = 0
    while checked := stale_runs.check_due_runs(project.database, now):
        count += checked
    return count


def load_health(project: ProjectFixture, run: Run) -> RunHealth:
    with project.database.reading() as tx:
        return run_details.load_health(tx, [run.id])[run.id]


def load_health_events(project: ProjectFixture, run: Run) -> list[str]:
    """Load the types of a run's events about its health, in order."""
    types = [row["type"] for row in project.load_rows(tables.events, run)]
    return [event_type for event_type in types if event_type in HEALTH_EVENTS]


def load_event_data(project: ProjectFixture, run: Run, event_type: str) -> dict[str, Any]:
    (event,) = project.load_events(run, event_type)
    event_data: dict[str, Any] = json.loads(event["body"])["data"]
    return event_data


def test_run_is_checked_when_it_could_be_stale(project: ProjectFixture) -> None:
    """The next check is due when silence would first be too long, however often the run posts."""
    run = project.open_run()
    project.post_observations(run, evals(0.5), at(200))
    assert check_until_done(project, at(299)) == 0
    assert check_until_done(project, at(300)) == 1
    assert (load_health(project, run).state, load_health(project, run).next_check_at) == ("alive", at(500))


def test_silent_run_is_stale_then_lost(project: ProjectFixture) -> None:
    """By default a run is stale after 5 minutes and lost after an hour, with one event each."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    for seconds in range(300, 5000, 300):
        check_until_done(project, at(seconds))
        expected = ["run.stale"] if seconds < 3600 else ["run.stale", "run.lost"]
        assert load_health_events(project, run) == expected, seconds
    loaded = project.load_run(run)
    assert (loaded.status, loaded.ended_at, load_health(project, run).next_check_at) == ("lost", at(3600), None)
    assert load_event_data(project, run, "run.stale")["health"] == {
        "state": "stale",
        "last_seen_at": "2026-01-01T12:00:00Z",
        "cadence_seconds": None,
    }


def test_run_is_stale_first_after_an_outage(project: ProjectFixture) -> None:
    """After a day without checks a run is stale, not lost: it must stay silent while it is checked."""
    run = project.open_run()
    assert check_until_done(project, at(86_400)) == 1
    assert (project.load_run(run).status, load_health_events(project, run)) == ("running", ["run.stale"])


def test_no_run_is_stale_before_it_could_report(project: ProjectFixture) -> None:
    """After the service was away, runs have their whole time again, and those that were stale are not lost sooner."""
    stale, run = project.open_run(), project.open_run()
    now = [at(0)]
    job = stale_runs.create_job(project.database, lambda: now[0])
    project.post_observations(run, evals(0.5), at(250))
    day = 86_400
    for seconds in (0, 40, 90, 140, 190, 240, 290, 300, day, day + 50):
        now[0] = at(seconds)
        job.do(lambda _: False)
    assert (load_health_events(project, stale), load_health_events(project, run)) == (["run.stale"], [])
    for seconds in range(day + 100, day + 351, 50):
        now[0] = at(seconds)
        job.do(lambda _: False)
    assert (load_health_events(project, stale), load_health_events(project, run)) == (["run.stale"], ["run.stale"])


def test_stale_run_recovers_with_its_next_post(project: ProjectFixture) -> None:
    """A run that posts is alive and can become stale again, with another event."""
    run = project.open_run()
    check_until_done(project, at(300))
    project.post_observations(run, evals(0.5), at(400))
    check_until_done(project, at(600))
    assert load_health(project, run).state == "alive"
    check_until_done(project, at(700))
    assert load_health_events(project, run) == ["run.stale", "run.stale"]


def test_slow_run_has_a_longer_stale_time(project: ProjectFixture) -> None:
    """A run that posts every 20 minutes is stale after three times as long."""
    run = project.open_run()
    for number in range(6):
        project.post_observations(run, evals(number / 7, start=number), at(1200 * number))
    check_until_done(project, at(6000 + 3599))
    assert load_health_events(project, run) == []
    assert load_health(project, run).cadence_seconds == 1200
    check_until_done(project, at(6000 + 3600))
    assert load_health_events(project, run) == ["run.stale"]


def test_heartbeats_keep_a_run_alive(project: ProjectFixture) -> None:
    """A run that sends heartbeats during a long eval is not stale."""
    run = project.open_run()
    for seconds in range(0, 7200, 240):
        open_run.record_heartbeat(project.database, project.id, run.id, at(seconds))
        check_until_done(project, at(seconds))
    assert (load_health_events(project, run), project.load_run(run).status) == ([], "running")


def test_lost_run_recovers_with_any_message(project: ProjectFixture) -> None:
    """A post, a heartbeat, a resume, a checkpoint or reopening revives a lost run, which can be lost again."""

    def resume(run: Run, now: datetime) -> None:
        project.submit(run, Resumed(0), now)

    messages: tuple[Callable[[Run, datetime], object], ...] = (
        lambda run, now: project.post_observations(run, evals(0.7, start=9), now),
        lambda run, now: open_run.record_heartbeat(project.database, project.id, run.id, now),
        resume,
        lambda run, now: open_run.open_run(
            project.database, project.id, open_run.OpenRequest(run.name, resume=open_run.Resume.ALLOW), now
        ),
        lambda run, now: project.submit(run, CheckpointSaved(0, "file:///0.pt"), now),
    )
    for number, send in enumerate(messages):
        start = 10_000 * number
        run = open_run.open_run(project.database, project.id, open_run.OpenRequest(f"run-{number}"), at(start))[0]
        project.post_observations(run, evals(0.5), at(start))
        check_until_done(project, at(start + 300))
        check_until_done(project, at(start + 3600))
        assert project.load_run(run).status == "lost"
        send(run, at(start + 5000))
        loaded = project.load_run(run)
        assert (loaded.status, loaded.ended_at, loaded.turn) == ("running", None, None)
        check_until_done(project, at(start + 5000))
        check_until_done(project, at(start + 5300))
        assert load_health_events(project, run) == ["run.stale", "run.lost", "run.stale"]


def test_ended_run_is_not_checked(project: ProjectFixture) -> None:
    """A run that has completed is not checked again, and a late heartbeat does not reopen it."""
    run = project.open_run()
    project.finish_run(run, now=at(10))
    open_run.record_heartbeat(project.database, project.id, run.id, at(20))
    assert check_until_done(project, at(300)) == 1
    assert check_until_done(project, at(10**6)) == 0
    assert (load_health_events(project, run), project.load_run(run).status) == ([], "completed")


def test_lost_run_can_be_finished_by_its_trainer(project: ProjectFixture) -> None:
    """A trainer's status replaces `lost`."""
    run = project.open_run()
    check_until_done(project, at(300))
    check_until_done(project, at(3600))
    assert project.finish_run(run, "failed", at(4000)).status == "failed"


def test_pending_stop_of_a_stale_run_is_on_hold(database: Database) -> None:
    """When a run becomes stale its pending stop is put on hold; when it is lost, the stop is moot."""
    project = set_up_project(database, veto_window_seconds=3600)
    run, _ = project.open_declining_run()
    check_until_done(project, at(300))
    decision = project.load_decision(run)
    assert decision.state == "on_hold"
    check_until_done(project, at(3600))
    after_loss = project.load_decision(run)
    assert after_loss.state == "moot"


def test_silence_holds_no_stop_that_goes_on_despite_it(database: Database) -> None:
    """A limit of stops that was lowered since does not hold it either: limits are checked when a stop is decided."""
    project = set_up_project(database, veto_window_seconds=10_000.0)
    members = [{"detector": "k_decline", "params": {"k": 3}}]
    project.add_policy({"name": "despite", "members": members, "stops_despite": ["stale", "no_checkpoint"]})
    runs = [project.open_declining_run(policy="despite")[0] for _ in range(2)]
    project.change_settings(stops_per_hour=1)
    check_until_done(project, at(400))
    assert len(project.load_events(runs[0], "run.stale")) == 1
    assert [project.load_decision(run).state for run in runs] == ["pending", "pending"]


@pytest.mark.parametrize("heartbeat", [False, True], ids=["post", "heartbeat first"])
def test_lost_run_that_returns_can_be_stopped_again(database: Database, heartbeat: bool) -> None:
    """A run that was lost while its stop was pending continues in a new attempt, with a stop of its own."""
    project = set_up_project(database, veto_window_seconds=3600)
    run, first = project.open_declining_run()
    check_until_done(project, at(300))
    check_until_done(project, at(3600))
    if heartbeat:
        open_run.record_heartbeat(project.database, project.id, run.id, at(4000))
    receipt = project.post_observations(run, evals(0.1, start=900), at(4001))
    assert receipt.decision is not None
    assert receipt.decision.id != first.id
    assert (receipt.decision.attempt, receipt.decision.state) == (2, "pending")
    loaded = project.load_run(run)
    assert (loaded.status, loaded.attempt) == ("running", 2)
    later = project.post_observations(run, evals(0.1, start=901), at(4002))
    assert later.decision is not None
    assert (later.decision.id, later.run.attempt) == (receipt.decision.id, 2)


def test_metric_fault_is_announced_once(project: ProjectFixture) -> None:
    """A metric fault is announced again only after a recovery."""
    run = project.open_run()
    project.post_observations(run, evals(0.5, 0.25), at(10))
    project.post_observations(run, [PostedObservation("kl", 100, 0.1)], at(200))
    check_until_done(project, at(300))
    project.post_observations(run, [PostedObservation("kl", 110, 0.1)], at(350))
    check_until_done(project, at(600))
    assert load_health_events(project, run) == ["run.metric_fault"]
    assert load_event_data(project, run, "run.metric_fault")["metric_fault"]["metric"] == "eval"
    assert [fault.metric for fault in load_health(project, run).metric_faults] == ["eval"]
    project.post_observations(run, evals(0.3, start=120), at(601))
    check_until_done(project, at(900))
    assert load_health(project, run).metric_faults == ()
    project.post_observations(run, [PostedObservation("kl", 100_000, 0.1)], at(901) + timedelta(hours=9))
    check_until_done(project, at(902) + timedelta(hours=9))
    assert load_health_events(project, run) == ["run.metric_fault"] * 2


@pytest.mark.slow
def test_concurrent_checks_announce_once(postgres_database: Database) -> None:
    """Four threads that check 40 silent runs send one event for each."""
    project = set_up_project(postgres_database)
    requests = [open_run.OpenRequest(f"run {number}") for number in range(40)]
    with postgres_database.transaction() as tx:
        stored = projects.get_project(tx, project.id)
        opened = [open_run.create_run(tx, stored, request, NOW).id for request in requests]
    assert run_concurrently(*[lambda: check_until_done(project, at(300))] * 4) == []
    event = tables.events.c
    query = sa.select(event.run_id, event.type).where(event.run_id.in_(opened), event.type.in_(HEALTH_EVENTS))
    with postgres_database.reading() as tx:
        assert sorted(map(tuple, tx.execute(query))) == [(run_id, "run.stale") for run_id in sorted(opened)]


def test_pause_holds_pending_stops_before_it_returns(database: Database) -> None:
    """When a pause returns, all pending stops of the project are on hold with its reason; repeating it changes
    nothing."""
    project, other = set_up_project(database, veto_window_seconds=60), set_up_project(database, veto_window_seconds=60)
    paused_runs = [project.open_run() for _ in range(3)]
    with database.transaction() as tx:
        tx.execute(tables.projects.update().values(stops_share=None))
    for run in (*paused_runs, run_elsewhere := other.open_run()):
        (other if run is run_elsewhere else project).post_observations(run, DECLINING_EVALS)
    assert {decision.state for run in paused_runs if (decision := project.find_decision(run))} == {"pending"}
    for actor in ("dana", "eli"):
        paused = pause.pause_project(database, project.id, actor, "the eval set is broken", at(10))
        assert (paused.paused_by, paused.paused_reason) == ("dana", "the eval set is broken")
        assert {decision.state for run in paused_runs if (decision := project.find_decision(run))} == {"on_hold"}
    late_run, _ = project.open_declining_run()
    (event,) = project.load_events(late_run, "run.stop_on_hold")
    assert "dana: the eval set is broken" in event["body"]
    decision = other.load_decision(run_elsewhere)
    assert decision.state == "pending"
    assert pause.resume_project(database, project.id, "dana", at(20)).paused_at is None


def test_pause_waits_for_a_decision_in_progress(postgres_database: Database) -> None:
    """A pause waits for an open transaction that adds a decision, and holds that stop before it returns."""
    project = set_up_project(postgres_database, veto_window_seconds=60)
    run = project.open_run()
    with postgres_database.transaction() as tx:
        locked = runs.lock_run(tx, project.id, run.id)
        decision = transitions.create_decision(tx, locked, 4, NOW)
        thread = threading.Thread(target=pause.pause_project, args=(postgres_database, project.id, "dana", "", NOW))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(60)
    held = project.load_decision(run)
    assert (decision.state, held.state) == ("pending", "on_hold")
