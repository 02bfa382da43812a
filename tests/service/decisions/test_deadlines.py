"""Whatever was handed out comes to an end: confirmed, or told to a person."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service import background
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, deadlines
from evalstop_service.ingest import Resumed
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported
from evalstop_service.store import decisions, endpoints, tables
from evalstop_service.store.decisions import Decision
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import Delivered, FinishedAttempt
from evalstop_service.store.runs import Run

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, lift_stop_limits, run_concurrently

CONFIRM = timedelta(seconds=900)
STOP_NEWS = ("run.stop_requested", "run.stop_escalated", "run.stop_failed")


@pytest.fixture
def project(project: ProjectFixture) -> ProjectFixture:
    """A project with an endpoint, which may have all its runs stopped."""
    lift_stop_limits(project.database)
    with project.database.transaction() as tx:
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=EVERY_EVENT, now=NOW)
    return project


def stopped(project: ProjectFixture) -> Run:
    """A run whose stop was handed out at NOW."""
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS)
    return run


def decided(project: ProjectFixture, run: Run) -> Decision:
    found = project.find_decision(run)
    assert found is not None
    return found


def told(project: ProjectFixture, run: Run) -> list[str]:
    return [row["type"] for row in project.load_rows(tables.events, run) if row["type"] in STOP_NEWS]


def states(project: ProjectFixture, run: Run) -> list[str]:
    return [row["state"] for row in project.load_rows(tables.decision_changes, run)]


def report(
    project: ProjectFixture, run: Run, state: DecisionState, now: datetime, expected_seconds: float = 0.0
) -> str:
    said = Reported(now, state, "receiver", "as seen", {}, expected_seconds)
    return commands.record_report(project.database, project.id, decided(project, run).id, said).state


def send_what_waits(project: ProjectFixture) -> None:
    with project.database.transaction() as tx:
        held = leases.claim_deliveries(tx, utc_now(), 60.0, 100, 100)
        leases.settle_deliveries(tx, [FinishedAttempt(one, Delivered(), utc_now()) for one in held])


def test_what_nobody_confirms_is_escalated_and_told_to_a_person(project: ProjectFixture) -> None:
    """Asked for again, then harder, then failed; each as a new event, and only when its own time is over."""
    run = stopped(project)
    for turn in range(1, 5):
        deadlines.process_overdue(project.database, NOW + turn * CONFIRM - timedelta(seconds=1))
        assert len(told(project, run)) == min(turn, 4)
        deadlines.process_overdue(project.database, NOW + turn * CONFIRM)
    assert told(project, run) == ["run.stop_requested", "run.stop_requested", "run.stop_escalated", "run.stop_failed"]
    assert states(project, run) == ["requested", "escalated", "escalated", "failed"]
    data = [
        json.loads(row["body"])["data"] for row in project.load_rows(tables.events, run) if row["type"] in STOP_NEWS
    ]
    assert len({one["decision"]["id"] for one in data}) == 1
    assert [one["decision"]["state"] for one in data] == ["requested", "escalated", "escalated", "failed"]
    assert decided(project, run).deadline_at is None
    assert report(project, run, DecisionState.CONFIRMED, NOW + 10 * CONFIRM) == DecisionState.CONFIRMED


def test_a_stop_that_comes_due_has_a_deadline(veto_project: ProjectFixture) -> None:
    """What a worker hands out at the end of its veto window is looked after from then on."""
    run = stopped(veto_project)
    (event,) = veto_project.load_events(run, "run.stop_requested")
    assert json.loads(event["body"])["data"]["decision"]["state"] == "requested", "as it is when it is sent"
    due_at = NOW + timedelta(seconds=60)
    with veto_project.database.transaction() as tx:
        assert decisions.request_due_decisions(tx, due_at) == 1
    assert decided(veto_project, run).deadline_at == due_at + CONFIRM
    deadlines.process_overdue(veto_project.database, due_at + CONFIRM)
    assert states(veto_project, run) == ["pending", "requested", "escalated"]


def test_an_endpoint_that_was_away_hears_of_the_last_alone(project: ProjectFixture) -> None:
    """A stop asked for anew takes the place of the one that still waits, so that the job gets its time to save."""
    run = stopped(project)
    deadlines.process_overdue(project.database, NOW + CONFIRM)
    deadlines.process_overdue(project.database, NOW + 2 * CONFIRM)
    waiting = {row["event_id"] for row in project.load_rows(tables.deliveries, run) if row["state"] == "waiting"}
    rows = [row["type"] for row in project.load_rows(tables.events, run) if row["id"] in waiting]
    assert [one for one in rows if one in STOP_NEWS] == ["run.stop_escalated"]


def test_who_acknowledges_is_given_time(project: ProjectFixture) -> None:
    """A stop that is under way is escalated only when its receiver has had the time that it asked for, and ours."""
    run = stopped(project)
    assert report(project, run, DecisionState.ACKNOWLEDGED, NOW, 3600.0) == DecisionState.ACKNOWLEDGED
    assert report(project, run, DecisionState.ACKNOWLEDGED, NOW + CONFIRM, 3600.0) == DecisionState.ACKNOWLEDGED
    assert decided(project, run).deadline_at == NOW + CONFIRM + timedelta(hours=1)
    deadlines.process_overdue(project.database, NOW + CONFIRM + timedelta(hours=1))
    assert decided(project, run).state == DecisionState.ESCALATED
    assert report(project, run, DecisionState.ACKNOWLEDGED, NOW + 2 * CONFIRM) == DecisionState.ACKNOWLEDGED


def test_many_at_one_time_escalate_once(project: ProjectFixture) -> None:
    """However many processes look after it at one moment, each rung is taken once."""
    runs = [stopped(project) for _ in range(3)]
    for turn in range(1, 4):
        now = NOW + turn * CONFIRM
        assert (
            run_concurrently(*[lambda now=now: deadlines.process_overdue(project.database, now) for _ in range(4)])
            == []
        )
        assert [len(told(project, run)) for run in runs] == [1 + turn] * 3


def test_a_run_that_went_on_is_not_asked_to_stop_again(project: ProjectFixture) -> None:
    """The stop of an attempt that is over reached a receiver that never answered: a person is told, nobody else."""
    run = stopped(project)
    send_what_waits(project)
    project.submit(run, Resumed(1))
    assert decided(project, run).state == DecisionState.REQUESTED
    deadlines.process_overdue(project.database, NOW + CONFIRM)
    assert told(project, run) == ["run.stop_requested", "run.stop_failed"]
    assert states(project, run) == ["requested", "failed"]


def test_one_that_cannot_be_looked_after_keeps_no_other_waiting(project: ProjectFixture) -> None:
    """What is wrong with it is raised when the others are done."""
    runs = [stopped(project) for _ in range(3)]
    with project.database.transaction() as tx:
        broken = sa.update(tables.decisions).where(tables.decisions.c.run_id == runs[1].id)
        tx.execute(broken.values(state="nonsense"))
    with pytest.raises(ValueError, match="nonsense"):
        deadlines.process_overdue(project.database, NOW + CONFIRM)
    assert [len(told(project, run)) for run in runs] == [2, 1, 2]


def test_as_a_chore_it_sees_to_the_end(project: ProjectFixture) -> None:
    """Beside a worker it wakes up for each deadline until nothing is owed any more."""
    with project.database.transaction() as tx:
        tx.execute(sa.update(tables.projects).values(confirm_seconds=0.1))
    run = stopped(project)
    with background.run_jobs(deadlines.create_job(project.database, utc_now)):
        wait_until(lambda: decided(project, run).state == DecisionState.FAILED)
    assert told(project, run) == ["run.stop_requested", "run.stop_requested", "run.stop_escalated", "run.stop_failed"]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline, rest = datetime.now(UTC) + timedelta(seconds=30), threading.Event()
    while not condition():
        assert datetime.now(UTC) < deadline
        rest.wait(0.01)
