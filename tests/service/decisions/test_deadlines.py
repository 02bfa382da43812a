"""Every requested stop ends: it is confirmed, or it fails and sends an event."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service import background
from evalstop_service.clock import utc_now
from evalstop_service.decisions import deadlines, pause
from evalstop_service.domain.decision_lifecycle import SERVICE, DecisionState
from evalstop_service.ingest import Resumed
from evalstop_service.store import hand_overs, projects, tables
from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import Delivered, FinishedAttempt
from evalstop_service.store.runs import Run

from tests.service.concurrency import run_concurrently, wait_until
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, lift_stop_limits, set_up_project

CONFIRM_TIME = timedelta(seconds=900)
STOP_EVENTS = ("run.stop_requested", "run.stop_escalated", "run.stop_failed")


@pytest.fixture
def project(project: ProjectFixture) -> ProjectFixture:
    """A project with an endpoint and without limits on stops."""
    lift_stop_limits(project.database)
    project.add_endpoint()
    return project


def load_stop_events(project: ProjectFixture, run: Run) -> list[str]:
    return [row["type"] for row in project.load_rows(tables.events, run) if row["type"] in STOP_EVENTS]


def deliver_waiting(project: ProjectFixture) -> None:
    with project.database.transaction() as tx:
        claimed = leases.claim_deliveries(tx, utc_now(), 60.0, 100, 100)
        leases.settle_deliveries(tx, [FinishedAttempt(delivery, Delivered(), utc_now()) for delivery in claimed])


def test_unconfirmed_stop_is_escalated_then_failed(project: ProjectFixture) -> None:
    """An unconfirmed stop is requested again, escalated, then failed, each at its deadline with a new event."""
    run, decision = project.open_declining_run()
    for period in range(1, 5):
        deadlines.process_overdue(project.database, NOW + period * CONFIRM_TIME - timedelta(seconds=1))
        assert len(load_stop_events(project, run)) == min(period, 4)
        deadlines.process_overdue(project.database, NOW + period * CONFIRM_TIME)
    assert load_stop_events(project, run) == [
        "run.stop_requested",
        "run.stop_requested",
        "run.stop_escalated",
        "run.stop_failed",
    ]
    assert project.load_decision_states(run) == ["requested", "escalated", "escalated", "failed"]
    data = [
        json.loads(row["body"])["data"] for row in project.load_rows(tables.events, run) if row["type"] in STOP_EVENTS
    ]
    assert len({event["decision"]["id"] for event in data}) == 1
    assert [event["decision"]["state"] for event in data] == ["requested", "escalated", "escalated", "failed"]
    assert project.load_decision(run).deadline_at is None
    assert project.record_report(decision, DecisionState.CONFIRMED, NOW + 10 * CONFIRM_TIME) == DecisionState.CONFIRMED


def test_stop_is_requested_at_the_end_of_its_window(veto_project: ProjectFixture) -> None:
    """A stop is requested at the end of its veto window, has an event then, and its deadline from then on."""
    run, _ = veto_project.open_declining_run()
    due_at = NOW + timedelta(seconds=60)
    assert [veto_project.end_windows(due_at - timedelta(seconds=1)), veto_project.end_windows(due_at)] == [0, 1]
    (event,) = veto_project.load_events(run, "run.stop_requested")
    assert json.loads(event["body"])["data"]["decision"]["state"] == "requested"
    assert veto_project.load_decision(run).deadline_at == due_at + CONFIRM_TIME
    deadlines.process_overdue(veto_project.database, due_at + CONFIRM_TIME)
    assert veto_project.load_decision_states(run) == ["pending", "requested", "escalated"]


def test_escalation_replaces_waiting_requests(project: ProjectFixture) -> None:
    """An endpoint that was down gets only the latest request, so that the job gets its time to save."""
    run, _ = project.open_declining_run()
    deadlines.process_overdue(project.database, NOW + CONFIRM_TIME)
    deadlines.process_overdue(project.database, NOW + 2 * CONFIRM_TIME)
    waiting = {row["event_id"] for row in project.load_rows(tables.deliveries, run) if row["state"] == "waiting"}
    rows = [row["type"] for row in project.load_rows(tables.events, run) if row["id"] in waiting]
    assert [row for row in rows if row in STOP_EVENTS] == ["run.stop_escalated"]


def test_acknowledgement_extends_the_deadline(project: ProjectFixture) -> None:
    """An acknowledged stop is escalated after the time its receiver asked for plus the usual deadline."""
    run, decision = project.open_declining_run()
    for at in (NOW, NOW + CONFIRM_TIME):
        state = project.record_report(decision, DecisionState.ACKNOWLEDGED, at, expected_seconds=3600.0)
        assert state == DecisionState.ACKNOWLEDGED
    assert project.load_decision(run).deadline_at == NOW + CONFIRM_TIME + timedelta(hours=1)
    deadlines.process_overdue(project.database, NOW + CONFIRM_TIME + timedelta(hours=1))
    assert project.load_decision(run).state == DecisionState.ESCALATED
    state = project.record_report(decision, DecisionState.ACKNOWLEDGED, NOW + 2 * CONFIRM_TIME)
    assert state == DecisionState.ACKNOWLEDGED


def test_concurrent_checks_escalate_once(project: ProjectFixture) -> None:
    """However many processes check deadlines at once, each escalation happens once."""
    runs = [project.open_declining_run()[0] for _ in range(3)]
    for period in range(1, 4):
        now = NOW + period * CONFIRM_TIME
        assert (
            run_concurrently(*[lambda now=now: deadlines.process_overdue(project.database, now) for _ in range(4)])
            == []
        )
        assert [len(load_stop_events(project, run)) for run in runs] == [1 + period] * 3


def test_stop_of_an_ended_attempt_fails_without_escalation(project: ProjectFixture) -> None:
    """A delivered, unconfirmed stop of an ended attempt fails with an event and is not requested again."""
    run, _ = project.open_declining_run()
    deliver_waiting(project)
    project.submit(run, Resumed(1))
    assert project.load_decision(run).state == DecisionState.REQUESTED
    deadlines.process_overdue(project.database, NOW + CONFIRM_TIME)
    assert load_stop_events(project, run) == ["run.stop_requested", "run.stop_failed"]
    assert project.load_decision_states(run) == ["requested", "failed"]


def test_unreadable_decision_does_not_block_others(project: ProjectFixture) -> None:
    """The error of one decision is raised after all others have been processed."""
    runs = [project.open_declining_run()[0] for _ in range(3)]
    with project.database.transaction() as tx:
        update = sa.update(tables.decisions).where(tables.decisions.c.run_id == runs[1].id)
        tx.execute(update.values(state="nonsense"))
    with pytest.raises(ValueError, match="nonsense"):
        deadlines.process_overdue(project.database, NOW + CONFIRM_TIME)
    assert [len(load_stop_events(project, run)) for run in runs] == [2, 1, 2]


def test_deadline_job_runs_until_the_stop_fails(project: ProjectFixture) -> None:
    """As a background job it finds each deadline until the stop has failed."""
    with project.database.transaction() as tx:
        tx.execute(sa.update(tables.projects).values(confirm_seconds=0.1))
    run, _ = project.open_declining_run()
    with background.run_jobs(deadlines.create_job(project.database, utc_now)):
        wait_until(lambda: project.load_decision(run).state == DecisionState.FAILED)
    assert load_stop_events(project, run) == [
        "run.stop_requested",
        "run.stop_requested",
        "run.stop_escalated",
        "run.stop_failed",
    ]


def test_unreadable_decision_does_not_keep_others_from_a_pause(database: Database) -> None:
    """The pause puts all other pending stops on hold before it raises the error of one."""
    project = set_up_project(database, veto_window_seconds=3600.0)
    lift_stop_limits(database)
    runs = [project.open_declining_run()[0] for _ in range(3)]
    with database.transaction() as tx:
        update = sa.update(tables.decisions).where(tables.decisions.c.run_id == runs[0].id)
        tx.execute(update.values(action="nonsense"))
    with pytest.raises(ValueError, match="nonsense"):
        pause.pause_project(database, project.id, "dana", "a broken grader", NOW)
    assert [project.load_decision_states(run)[-1] for run in runs] == ["pending", "on_hold", "on_hold"]


def test_job_completes_an_interrupted_pause(database: Database) -> None:
    """If the database fails after a project was paused, its pending stops are put on hold all the same."""
    project, other = set_up_project(database), set_up_project(database)
    for of_database in (project, other):  # by PostgreSQL's clock too, the window is open
        of_database.change_settings(veto_window_seconds=100 * 365 * 86_400.0)
    run, other_run = project.open_declining_run()[0], other.open_declining_run()[0]
    project.change_settings(paused_at=NOW, paused_by="dana", paused_reason="a broken grader")
    deadlines.create_job(database, lambda: NOW).do(lambda _seconds: False)
    assert project.load_decision_states(run) == ["pending", "on_hold"]
    assert "dana: a broken grader" in project.load_decision(run).state_reason
    assert other.load_decision_states(other_run) == ["pending"]


def test_pause_with_an_end_ends_by_itself(veto_project: ProjectFixture) -> None:
    """At its end the pause is over, unless it was made longer meanwhile; until then stops say how long it lasts."""
    until = NOW + timedelta(minutes=2)
    pause.pause_project(veto_project.database, veto_project.id, "dana", "a broken grader", NOW, until=until)
    _, decision = veto_project.open_declining_run()
    assert "dana until 2026-01-01T12:02:00Z: a broken grader" in decision.state_reason
    with veto_project.database.transaction() as tx:
        assert projects.list_ended_pauses(tx, until - timedelta(seconds=1)) == []
        assert projects.list_ended_pauses(tx, until) == [veto_project.id]
    early = pause.resume_project(veto_project.database, veto_project.id, SERVICE, NOW, only_if_over=True)
    assert early.paused_at is not None, "the pause was made longer meanwhile"
    # By PostgreSQL's clock the end has passed too.
    deadlines.create_job(veto_project.database, lambda: until).do(lambda _seconds: False)
    with veto_project.database.reading() as tx:
        assert projects.get_project(tx, veto_project.id).paused_at is None


def test_unreadable_decision_delays_no_other_window(project: ProjectFixture) -> None:
    """The veto windows of all others end, or are extended after an outage."""
    project.change_settings(veto_window_seconds=60.0)
    runs = [project.open_run(name) for name in ("damaged", "whole")]
    for run in runs:
        project.post_observations(run, DECLINING_EVALS)
    with project.database.transaction() as tx:
        update = sa.update(tables.decisions).where(tables.decisions.c.run_id == runs[0].id)
        tx.execute(update.values(action="nonsense"))
    with project.database.transaction() as tx:
        assert hand_overs.extend_windows(tx, NOW + timedelta(seconds=30), 60.0, None, "an outage") == 2
    with pytest.raises(ValueError, match="nonsense"):
        project.end_windows(NOW + timedelta(seconds=100))
    assert project.load_decision(runs[1]).state == DecisionState.REQUESTED
