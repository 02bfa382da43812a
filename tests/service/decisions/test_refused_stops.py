"""A stop that receivers refuse is a failure that a person hears of, at once."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_service.decisions import deadlines
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.store import decisions, endpoints, tables
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import FinishedAttempt
from evalstop_service.store.runs import Run
from evalstop_service.webhooks.retry import Answer, Backoff, judge_answer

from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, lift_stop_limits

RECEIVERS = ("http://one.example/", "http://two.example/")


@pytest.fixture
def run(project: ProjectFixture) -> Run:
    """A run whose stop was sent to two receivers a moment ago."""
    lift_stop_limits(project.database)
    with project.database.transaction() as tx:
        for url in RECEIVERS:
            endpoints.add_endpoint(tx, project.id, url=url, event_types=["run.stop_requested"], now=NOW)
        endpoints.add_endpoint(tx, project.id, url="http://people.example/", event_types=["run.stop_failed"], now=NOW)
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS)
    return run


def answer_stop(project: ProjectFixture, *answers: Answer) -> None:
    """Have the receivers answer to what waits for them, in their order."""
    at = NOW + timedelta(seconds=1)
    with project.database.transaction() as tx:
        claimed = sorted(leases.claim_deliveries(tx, at, 60.0, 10, 10), key=lambda one: one.url)
        judged = [judge_answer(answer, 1, at, 0.5, Backoff()) for answer in answers]
        leases.settle_deliveries(
            tx, [FinishedAttempt(one, result, at) for one, result in zip(claimed, judged, strict=True)]
        )


def check_deadlines(project: ProjectFixture, run: Run) -> DecisionState:
    """The state of the decision once deadlines were looked after, long before its own is over."""
    deadlines.process_overdue(project.database, NOW + timedelta(seconds=2))
    decision = project.find_decision(run)
    assert decision is not None
    return decision.state


def test_a_stop_that_is_too_large_for_its_receivers_has_failed(project: ProjectFixture, run: Run) -> None:
    """413 from every receiver is the end of the stop, and `run.stop_failed` says so without waiting for a deadline."""
    too_large = Answer(413, None, None, 1.0)
    answer_stop(project, too_large, too_large)
    assert check_deadlines(project, run) == DecisionState.FAILED
    (event,) = project.load_events(run, "run.stop_failed")
    assert len([row for row in project.load_rows(tables.deliveries, run) if row["event_id"] == event["id"]]) == 1
    with project.database.reading() as tx:
        decision = project.find_decision(run)
        assert decision is not None
        assert "413" in decisions.list_changes(tx, decision)[-1].reason


@pytest.mark.parametrize("other", [204, 503], ids=["takes", "is away"])
def test_a_stop_that_one_receiver_may_take_goes_on(project: ProjectFixture, run: Run, other: int) -> None:
    """While one of the receivers took the stop, or may take it yet, the refusal of another fails nothing."""
    answer_stop(project, Answer(413, None, None, 1.0), Answer(other, None, None, 1.0))
    assert check_deadlines(project, run) == DecisionState.REQUESTED
