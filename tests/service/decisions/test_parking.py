"""A run that may have turned is parked: set aside so that it can return, by itself or by a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from evalstop_service.decisions import commands, deadlines, stale_runs
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import figures
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.rules.decision_lifecycle import Action, DecisionState, Reported, StopOrdered, Undone, Vetoed
from evalstop_service.rules.statuses import RunStatus, Treatment
from evalstop_service.store import cases, endpoints, policies, projects, tables
from evalstop_service.store.case_counts import CaseFilter
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.event_check import check_events
from tests.service.project_fixture import DECLINING_EVALS, NOW, ONE_HOUR_LATER, ProjectFixture, evals, set_up_project

SET_ASIDE: dict[str, Any] = {
    "name": "set-aside",
    "action": "park",
    "members": [{"detector": "k_decline", "params": {"k": 3}, "suspect_at": 1, "stop_at": 3}],
    "stops_despite": ["no_checkpoint"],
}
"""It parks after three declines, and has the run return once the eval rises."""

RISING = evals(0.8, 0.9, 0.95, start=5)


def set_up_parking(database: Database, event_types: Sequence[str] = EVERY_EVENT, **terms: Any) -> ProjectFixture:
    """A project with a policy that parks, and an endpoint that wants these events."""
    project = set_up_project(database, **terms)
    with database.transaction() as tx:
        policies.add_policy(tx, projects.get_project(tx, project.id), "set-aside", SET_ASIDE, NOW)
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=event_types, now=NOW)
    return project


@pytest.fixture
def project(database: Database) -> Iterator[ProjectFixture]:
    """A project that parks; the events that the test has led to are held to their schemas."""
    made = set_up_parking(database)
    yield made
    check_events(database)


def open_suspect(project: ProjectFixture, **terms: Any) -> tuple[Run, Decision]:
    """A run that is to be parked."""
    run = project.open_run(policy="set-aside", **terms)
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    return run, decision


def report(
    project: ProjectFixture, decision: Decision, state: DecisionState, at: datetime = ONE_HOUR_LATER
) -> DecisionState:
    told = Reported(at, state, "receiver", "as seen", {"parked_as": "held"})
    return commands.record_report(project.database, project.id, decision.id, told).state


def park(project: ProjectFixture, **terms: Any) -> tuple[Run, Decision]:
    run, decision = open_suspect(project, **terms)
    assert report(project, decision, DecisionState.PARKED) is DecisionState.PARKED
    return run, decision


def event_types(project: ProjectFixture, run: Run) -> list[str]:
    return [row["type"] for row in project.load_rows(tables.events, run)]


def states(project: ProjectFixture, run: Run) -> list[str]:
    return [row["state"] for row in project.load_rows(tables.decision_changes, run)]


def undo(project: ProjectFixture, decision_id: UUID) -> DecisionState:
    word = Undone(ONE_HOUR_LATER, "dana", "a new curriculum")
    return commands.apply_command(project.database, project.id, decision_id, word).state


def test_a_parked_run_has_not_ended(project: ProjectFixture) -> None:
    """The receiver is asked to park, never to stop; the run is parked once it reports so, and its trainer goes on."""
    run, decision = open_suspect(project)
    assert (decision.action, decision.state, decision.stops(ONE_HOUR_LATER)) == (
        Action.PARK,
        DecisionState.REQUESTED,
        False,
    )
    assert report(project, decision, DecisionState.ACKNOWLEDGED) is DecisionState.ACKNOWLEDGED
    assert report(project, decision, DecisionState.PARKED) is DecisionState.PARKED
    parked = project.load_run(run)
    assert (parked.status, parked.ended_at) == (RunStatus.PARKED, None)
    assert [one for one in event_types(project, run) if "park" in one or "stop" in one] == [
        "run.park_requested",
        "run.parked",
    ]


def test_a_stop_cannot_be_reported_as_parked(project: ProjectFixture) -> None:
    """Who was to end a job and has parked it hears that this was not asked for."""
    run = project.open_run(policy="paper")
    project.submit(run, CheckpointSaved(1, "s3://one"))
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    with pytest.raises(Conflict, match="stopped, not parked"):
        report(project, decision, DecisionState.PARKED)


def test_nobody_is_parked_where_nobody_can_park(database: Database) -> None:
    """Without an endpoint that asks for it the decision is on hold and says so; an endpoint lets it go on."""
    project = set_up_parking(database, event_types=["run.stop_requested", "*"])
    run, decision = open_suspect(project)
    assert (decision.state, decision.guard_kinds) == (DecisionState.ON_HOLD, ["cannot_park"])
    assert "run.park_requested" in decision.state_reason
    with database.transaction() as tx:
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=["run.park_requested"], now=NOW)
    deadlines.process_overdue(database, NOW + timedelta(minutes=2))
    after = project.find_decision(run)
    assert after is not None
    assert after.state is DecisionState.REQUESTED


def test_a_run_that_recovers_on_idle_gpus_returns_by_itself(project: ProjectFixture) -> None:
    """A parked job that goes on and recovers is asked back, and its run may be parked again."""
    run, decision = park(project)
    project.post_observations(run, RISING, ONE_HOUR_LATER)
    returned = project.load_run(run)
    assert (returned.status, returned.attempt) == (RunStatus.RUNNING, 2)
    taken_back = project.find_decision(run, attempt=1)
    assert taken_back is not None
    assert taken_back.state is DecisionState.UNDONE
    assert "recovered" in taken_back.state_reason
    assert event_types(project, run).count("run.resume_requested") == 1
    again = project.post_observations(run, evals(0.7, 0.6, 0.5, start=8), ONE_HOUR_LATER).decision
    assert again is not None
    assert (again.id != decision.id, again.attempt, again.state) == (True, 2, DecisionState.REQUESTED)


def test_the_return_is_the_same_when_the_state_is_rebuilt(project: ProjectFixture) -> None:
    """A process that knows nothing of a parked run has it return by the same evals."""
    run, _ = park(project)
    project.drop_monitor_state(run)
    project.post_observations(run, RISING[:1], ONE_HOUR_LATER)
    project.drop_monitor_state(run)
    project.post_observations(run, RISING[1:], ONE_HOUR_LATER)
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 2)


def test_a_job_that_resumes_from_its_checkpoint_is_parked_still(project: ProjectFixture) -> None:
    """The requeued job begins a new attempt; the decision goes with it, until an eval past its step tells otherwise."""
    run, decision = park(project)
    project.submit(run, Resumed(2), ONE_HOUR_LATER)
    resumed = project.load_run(run)
    assert (resumed.status, resumed.attempt) == (RunStatus.PARKED, 2)
    carried = project.find_decision(run, attempt=2)
    assert carried is not None
    assert (carried.id, carried.state) == (decision.id, DecisionState.PARKED)
    project.post_observations(run, evals(0.95, 0.96, start=3), ONE_HOUR_LATER)
    assert project.load_run(run).status is RunStatus.PARKED, "step 4 is where it was parked: nothing new is known"
    project.post_observations(run, evals(0.97, start=5), ONE_HOUR_LATER)
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 3)


def test_a_job_may_resume_before_its_receiver_reports(project: ProjectFixture) -> None:
    """On idle GPUs a requeued job may start before the report is there: it is parked all the same."""
    run, decision = open_suspect(project)
    assert report(project, decision, DecisionState.ACKNOWLEDGED) is DecisionState.ACKNOWLEDGED
    project.submit(run, Resumed(4), ONE_HOUR_LATER)
    assert project.load_run(run).status is RunStatus.RUNNING
    assert report(project, decision, DecisionState.PARKED) is DecisionState.PARKED
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.PARKED, 2)


def test_a_trainer_that_failed_as_it_was_set_aside_is_parked(project: ProjectFixture) -> None:
    """A trainer that is terminated may report that it failed; its job is parked, and can return."""
    run, decision = open_suspect(project)
    report(project, decision, DecisionState.ACKNOWLEDGED)
    commands.finish_run(project.database, project.id, run.id, "failed", NOW)
    assert project.load_run(run).status is RunStatus.FAILED
    report(project, decision, DecisionState.PARKED)
    assert (project.load_run(run).status, project.load_run(run).ended_at) == (RunStatus.PARKED, None)


def test_a_person_has_it_return_and_it_is_not_parked_again(project: ProjectFixture) -> None:
    """A person's word stands: the run goes on, also in its next attempt, although the policy still suspects it."""
    run, decision = park(project)
    assert undo(project, decision.id) is DecisionState.UNDONE
    assert project.load_run(run).status is RunStatus.RUNNING
    assert event_types(project, run).count("run.resume_requested") == 1
    project.submit(run, Resumed(4), ONE_HOUR_LATER)
    project.post_observations(run, evals(0.5, 0.4, 0.3, start=5), ONE_HOUR_LATER)
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 2)
    assert states(project, run) == ["requested", "parked", "undone"]


def test_a_person_stops_a_parked_run_for_good(project: ProjectFixture) -> None:
    """The same decision then asks to stop; once the job is gone the run is stopped."""
    run, decision = park(project)
    order = StopOrdered(ONE_HOUR_LATER, "dana", "no more of this")
    ordered = commands.stop_run(project.database, project.id, run.id, order)
    assert (ordered.id, ordered.action, ordered.state) == (decision.id, Action.STOP, DecisionState.REQUESTED)
    assert ordered.stops(ONE_HOUR_LATER)
    assert event_types(project, run).count("run.stop_requested") == 1
    assert report(project, decision, DecisionState.CONFIRMED) is DecisionState.CONFIRMED
    assert project.load_run(run).status is RunStatus.STOPPED


def test_what_parking_gave_and_cost_is_counted(project: ProjectFixture) -> None:
    """A run that returned was late by the hours it was parked; one that was stopped for good gave its GPUs as long."""
    labels = {"gpus": "4"}
    returned, _ = park(project, labels=labels)
    project.post_observations(returned, RISING, ONE_HOUR_LATER + timedelta(hours=3))
    stopped, decision = park(project, labels=labels)
    order = StopOrdered(ONE_HOUR_LATER + timedelta(hours=2), "dana", "no more of this")
    commands.stop_run(project.database, project.id, stopped.id, order)
    report(project, decision, DecisionState.CONFIRMED, order.at)
    with project.database.reading() as tx:
        first, second = (cases.find_case(tx, run.id, 1) for run in (returned, stopped))
        (whole,) = figures.load_figures(tx, project.id, CaseFilter())
    assert first is not None
    assert second is not None
    assert (first.parked_seconds, first.gpu_hours) == (3 * 3600.0, 4.0)  # an hour passed before it was parked
    assert (first.treatment, second.treatment) == (Treatment.PREVENTED, Treatment.STOPPED)
    assert whole.parks == figures.Parks(cases=2, went_on=1, delay_hours=3.0)
    assert second.parked_seconds == 2 * 3600.0
    assert whole.hours.parked == 4 * 5


def test_a_new_attempt_does_not_pay_for_parking_before_it(project: ProjectFixture) -> None:
    """A parked job that starts again and is stopped has its own hours, without those parked before it began."""
    run, decision = park(project, labels={"gpus": "4"})
    restarted, ordered = ONE_HOUR_LATER + timedelta(hours=3), ONE_HOUR_LATER + timedelta(hours=4)
    project.submit(run, Resumed(1), restarted)
    commands.stop_run(project.database, project.id, run.id, StopOrdered(ordered, "dana", "no more of this"))
    report(project, decision, DecisionState.CONFIRMED, ordered + timedelta(hours=1))
    with project.database.reading() as tx:
        case = cases.find_case(tx, run.id, 2)
    assert case is not None
    assert (case.parked_seconds, case.gpu_hours) == (4 * 3600.0, 4.0)  # parked from before; stopping took an hour


def test_a_park_that_is_under_way_cannot_become_a_stop(project: ProjectFixture) -> None:
    """The receiver is at work on it; the order is refused with what to do."""
    run, _ = open_suspect(project)
    with pytest.raises(Conflict, match="once it is parked"):
        commands.stop_run(project.database, project.id, run.id, StopOrdered(ONE_HOUR_LATER, "dana", ""))


def test_a_run_that_recovers_before_it_is_parked_is_left_alone(database: Database) -> None:
    """Within the veto window the eval may rise again: nothing is sent, and the run may be parked later."""
    project = set_up_parking(database, veto_window_seconds=60.0)
    run, decision = open_suspect(project)
    assert decision.state is DecisionState.PENDING
    project.post_observations(run, RISING)
    assert states(project, run) == ["pending", "moot"]
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 2)
    (delivery,) = [row for row in project.load_rows(tables.deliveries, run) if row["due_at"] > NOW]
    assert delivery["state"] == "cancelled"


def test_a_veto_is_heard_as_for_a_stop(database: Database) -> None:
    """Within the veto window a person can say no."""
    project = set_up_parking(database, veto_window_seconds=60.0)
    run, decision = open_suspect(project)
    commands.apply_command(project.database, project.id, decision.id, Vetoed(NOW, "dana", "a known dip"))
    project.post_observations(run, evals(0.5, 0.4, start=5))
    assert states(project, run) == ["pending", "vetoed"]


def test_people_are_reminded_of_what_is_parked(project: ProjectFixture) -> None:
    """A job that is parked for a week is an alarm, each week again, and stays parked."""
    run, _ = park(project)
    for weeks in (1, 2):
        deadlines.process_overdue(project.database, ONE_HOUR_LATER + timedelta(days=7 * weeks, minutes=weeks))
        assert event_types(project, run).count("run.park_overdue") == weeks
    assert project.load_run(run).status is RunStatus.PARKED


def test_a_job_that_does_not_come_back_is_an_alarm(project: ProjectFixture) -> None:
    """Where a scheduler refuses to resume it, or has no room, its run is silent: people hear of it."""
    run, decision = park(project)
    assert undo(project, decision.id) is DecisionState.UNDONE
    assert stale_runs.check_due_runs(project.database, ONE_HOUR_LATER + timedelta(hours=2)) == 1
    assert event_types(project, run)[-1] == "run.stale"


def test_a_run_that_ends_while_it_is_parked_is_over(project: ProjectFixture) -> None:
    """On idle GPUs it may come to its end: the decision is moot, and nothing is sent."""
    run, _ = park(project)
    commands.finish_run(project.database, project.id, run.id, "completed", ONE_HOUR_LATER)
    assert project.load_run(run).status is RunStatus.COMPLETED
    assert states(project, run) == ["requested", "parked", "moot"]
    assert "run.resume_requested" not in event_types(project, run)


def test_a_parked_run_is_attached_to_by_its_job(project: ProjectFixture) -> None:
    """The requeued job opens its run by the same name: it is the same run, parked still, and not another one."""
    run, _ = park(project, name="ppo-7b", job="slurm 4711")
    attached = project.open_run("ppo-7b", policy="set-aside", job="slurm 4711")
    assert (attached.id, attached.status) == (run.id, RunStatus.PARKED)
