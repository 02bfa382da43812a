"""A stop that all its receivers refuse fails at once, with an event."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_service.decisions import deadlines
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.store import decisions, tables
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import FinishedAttempt
from evalstop_service.store.runs import Run
from evalstop_service.webhooks.retry import Answer, Backoff, judge_answer

from tests.service.project_fixture import NOW, ProjectFixture, lift_stop_limits

RECEIVERS = ("http://one.example/", "http://two.example/")


@pytest.fixture
def run(project: ProjectFixture) -> Run:
    """A run whose stop was just sent to two receivers."""
    lift_stop_limits(project.database)
    for url in RECEIVERS:
        project.add_endpoint(["run.stop_requested"], url)
    project.add_endpoint(["run.stop_failed"], "http://people.example/")
    return project.open_declining_run()[0]


def answer_stop(project: ProjectFixture, *answers: Answer) -> None:
    """Settle the waiting deliveries with these answers, ordered by URL."""
    at = NOW + timedelta(seconds=901)
    with project.database.transaction() as tx:
        claimed = sorted(leases.claim_deliveries(tx, at, 60.0, 10, 10), key=lambda delivery: delivery.url)
        results = [judge_answer(answer, 1, at, 0.5, Backoff()) for answer in answers]
        leases.settle_deliveries(
            tx, [FinishedAttempt(delivery, result, at) for delivery, result in zip(claimed, results, strict=True)]
        )


def check_deadlines(project: ProjectFixture, run: Run) -> DecisionState:
    """Process deadlines long before that of the decision; return the decision's state."""
    deadlines.process_overdue(project.database, NOW + timedelta(seconds=2))
    return project.load_decision(run).state


def test_stop_too_large_for_its_receivers_fails(project: ProjectFixture, run: Run) -> None:
    """If every receiver answers 413, the stop fails and sends `run.stop_failed` before its deadline."""
    too_large = Answer(413, None, 1.0)
    answer_stop(project, too_large, too_large)
    assert check_deadlines(project, run) == DecisionState.FAILED
    (event,) = project.load_events(run, "run.stop_failed")
    assert len([row for row in project.load_rows(tables.deliveries, run) if row["event_id"] == event["id"]]) == 1
    with project.database.reading() as tx:
        decision = project.load_decision(run)
        assert "413" in decisions.list_changes(tx, decision)[-1].reason


@pytest.mark.parametrize("other", [204, 503], ids=["accepted", "unavailable"])
def test_stop_refused_by_one_receiver_stays_requested(project: ProjectFixture, run: Run, other: int) -> None:
    """While another receiver accepted the stop, or may accept it yet, one refusal fails nothing."""
    answer_stop(project, Answer(413, None, 1.0), Answer(other, None, 1.0))
    assert check_deadlines(project, run) == DecisionState.REQUESTED


def test_deadline_job_finds_refused_stops(project: ProjectFixture, run: Run) -> None:
    """It need not wait for the deadline of a refused stop."""
    project.change_settings(confirm_seconds=100 * 365 * 86_400.0)  # past PostgreSQL's clock too
    deadlines.process_overdue(project.database, NOW + timedelta(seconds=900))
    job = deadlines.create_job(project.database, lambda: NOW)
    job.do(lambda _seconds: False)
    assert project.load_decision(run).state == DecisionState.ESCALATED
    answer_stop(project, *[Answer(413, None, 1.0)] * 2)
    job.do(lambda _seconds: False)
    assert project.load_decision(run).state == DecisionState.FAILED
