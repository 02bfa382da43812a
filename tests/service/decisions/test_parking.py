"""Parking a run that may have turned: the job is set aside and can return by itself or by a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from evalstop_service.decisions import deadlines, stale_runs
from evalstop_service.domain.decision_commands import StopOrdered, Undone, Vetoed
from evalstop_service.domain.decision_lifecycle import Action, DecisionState
from evalstop_service.domain.statuses import RunStatus, Treatment
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import figures
from evalstop_service.ingest import (
    CheckpointSaved,
    Committer,
    Message,
    Observations,
    Resumed,
    RunCache,
    running_in_thread,
)
from evalstop_service.ingest.open_run import Resume
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import endpoints, tables
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run
from prometheus_client import Histogram

from tests.fixtures.projects import EVERY_EVENT
from tests.service.event_check import check_events
from tests.service.project_fixture import DECLINING_EVALS, NOW, ONE_HOUR_LATER, ProjectFixture, evals, set_up_project

PARKING_POLICY: dict[str, Any] = {
    "name": "set-aside",
    "action": "park",
    "members": [{"detector": "k_decline", "params": {"k": 3}, "suspect_at": 1, "stop_at": 3}],
    "stops_despite": ["no_checkpoint"],
}
"""Parks after three declines, and lets the run return once the eval rises."""

RISING = evals(0.8, 0.9, 0.95, start=5)


def set_up_parking(database: Database, event_types: Sequence[str] = EVERY_EVENT, **options: Any) -> ProjectFixture:
    """Set up a project with a policy that parks, and an endpoint with these event types."""
    project = set_up_project(database, **options)
    project.add_policy(PARKING_POLICY)
    project.add_endpoint(event_types)
    return project


@pytest.fixture
def project(database: Database) -> Iterator[ProjectFixture]:
    """A project that parks; afterwards its events are validated against their schemas."""
    yield set_up_parking(database)
    check_events(database)


def park_run(project: ProjectFixture, **options: Any) -> tuple[Run, Decision]:
    run, decision = project.open_declining_run(policy="set-aside", **options)
    assert project.record_report(decision, DecisionState.PARKED) is DecisionState.PARKED
    return run, decision


def load_event_types(project: ProjectFixture, run: Run) -> list[str]:
    return [row["type"] for row in project.load_rows(tables.events, run)]


def undo_decision(project: ProjectFixture, decision: Decision) -> DecisionState:
    return project.apply_command(decision, Undone(ONE_HOUR_LATER, "dana", "a new curriculum"))


def test_park_sends_no_stop_and_does_not_end_the_run(project: ProjectFixture) -> None:
    """The receiver is asked to park, never to stop; the run is parked once it reports so, and does not end."""
    run, decision = project.open_declining_run(policy="set-aside")
    assert (decision.action, decision.state, decision.stops) == (
        Action.PARK,
        DecisionState.REQUESTED,
        False,
    )
    assert project.record_report(decision, DecisionState.ACKNOWLEDGED) is DecisionState.ACKNOWLEDGED
    assert project.record_report(decision, DecisionState.PARKED) is DecisionState.PARKED
    parked = project.load_run(run)
    assert (parked.status, parked.ended_at) == (RunStatus.PARKED, None)
    assert [event for event in load_event_types(project, run) if "park" in event or "stop" in event] == [
        "run.park_requested",
        "run.parked",
    ]


def test_stop_cannot_be_reported_as_parked(project: ProjectFixture) -> None:
    """A receiver that parked a job instead of stopping it gets a conflict."""
    run = project.open_run(policy="paper")
    project.submit(run, CheckpointSaved(1, "s3://one"))
    project.post_observations(run, DECLINING_EVALS)
    decision = project.load_decision(run)
    with pytest.raises(Conflict, match="stopped, not parked"):
        project.record_report(decision, DecisionState.PARKED)


def test_park_is_on_hold_without_a_parking_receiver(database: Database) -> None:
    """Without an endpoint for `run.park_requested` the decision is on hold; a new endpoint releases it."""
    project = set_up_parking(database, event_types=["run.stop_requested", "*"])
    run, decision = project.open_declining_run(policy="set-aside")
    assert (decision.state, decision.guard_kinds) == (DecisionState.ON_HOLD, ["cannot_park"])
    assert "run.park_requested" in decision.state_reason
    event_types = ["run.park_requested"]
    with database.transaction() as tx:
        chat_url = "http://127.0.0.1:8/"
        endpoints.add_endpoint(tx, project.id, url=chat_url, event_types=event_types, now=NOW, format="slack")
    deadlines.process_overdue(database, NOW + timedelta(minutes=1))
    assert project.load_decision(run).state is DecisionState.ON_HOLD, "a chat parks no job"
    project.add_endpoint(event_types)
    deadlines.process_overdue(database, NOW + timedelta(minutes=2))
    released = project.load_decision(run)
    assert released.state is DecisionState.REQUESTED


def test_parked_run_that_recovers_returns_by_itself(project: ProjectFixture) -> None:
    """A parked job that goes on and recovers is asked to resume, and its run can be parked again."""
    run, decision = park_run(project)
    project.post_observations(run, RISING, ONE_HOUR_LATER)
    returned = project.load_run(run)
    assert (returned.status, returned.attempt) == (RunStatus.RUNNING, 2)
    first_decision = project.load_decision(run, attempt=1)
    assert first_decision.state is DecisionState.UNDONE
    assert "recovered" in first_decision.state_reason
    assert load_event_types(project, run).count("run.resume_requested") == 1
    again = project.post_observations(run, evals(0.7, 0.6, 0.5, start=8), ONE_HOUR_LATER).decision
    assert again is not None
    assert (again.id != decision.id, again.attempt, again.state) == (True, 2, DecisionState.REQUESTED)


def test_rebuilt_state_also_returns_a_parked_run(project: ProjectFixture) -> None:
    """A process without the cached state of a parked run lets it return at the same eval."""
    run, _ = park_run(project)
    project.drop_monitor_state(run)
    project.post_observations(run, RISING[:1], ONE_HOUR_LATER)
    project.drop_monitor_state(run)
    project.post_observations(run, RISING[1:], ONE_HOUR_LATER)
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 2)


def test_resumed_job_stays_parked_until_a_new_eval(project: ProjectFixture) -> None:
    """A requeued job starts a new attempt, still parked until an eval past the step at which it was parked."""
    run, decision = park_run(project)
    for _ in range(2):  # a client that got no answer sends it again
        project.submit(run, Resumed(2), ONE_HOUR_LATER)
    resumed = project.load_run(run)
    assert (resumed.status, resumed.attempt) == (RunStatus.PARKED, 2)
    decision_of_attempt_2 = project.load_decision(run, attempt=2)
    assert (decision_of_attempt_2.id, decision_of_attempt_2.state) == (decision.id, DecisionState.PARKED)
    assert project.load_rows(tables.cases, run) == [], "neither attempt was judged yet"
    project.post_observations(run, evals(0.95, 0.96, start=3), ONE_HOUR_LATER)
    assert project.load_run(run).status is RunStatus.PARKED, "parked at step 4: no new eval yet"
    project.post_observations(run, evals(0.97, start=5), ONE_HOUR_LATER)
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 3)


def test_job_resumed_before_the_report_is_parked(project: ProjectFixture) -> None:
    """If a requeued job starts before the receiver reports, its new attempt is parked."""
    run, decision = project.open_declining_run(policy="set-aside")
    assert project.record_report(decision, DecisionState.ACKNOWLEDGED) is DecisionState.ACKNOWLEDGED
    project.submit(run, Resumed(4), ONE_HOUR_LATER)
    assert project.load_run(run).status is RunStatus.RUNNING
    assert project.record_report(decision, DecisionState.PARKED) is DecisionState.PARKED
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.PARKED, 2)


def test_trainer_that_fails_while_parked_can_return(project: ProjectFixture) -> None:
    """A trainer terminated by parking may report a failure; the run is parked all the same."""
    run, decision = project.open_declining_run(policy="set-aside")
    project.record_report(decision, DecisionState.ACKNOWLEDGED)
    project.finish_run(run, "failed")
    assert project.load_run(run).status is RunStatus.FAILED
    project.record_report(decision, DecisionState.PARKED)
    assert (project.load_run(run).status, project.load_run(run).ended_at) == (RunStatus.PARKED, None)


def test_undone_park_is_not_parked_again(project: ProjectFixture) -> None:
    """After a person undoes the park, the run goes on, also in its next attempt, although its evals still decline."""
    run, decision = park_run(project)
    parked = project.load_run(run)
    assert project.load_case(run).treatment is Treatment.STOPPED
    assert undo_decision(project, decision) is DecisionState.UNDONE
    returned = project.load_run(run)
    assert (returned.status, returned.version) == (RunStatus.RUNNING, parked.version + 1)
    assert project.load_rows(tables.cases, run) == []
    assert load_event_types(project, run).count("run.resume_requested") == 1
    project.submit(run, Resumed(4), ONE_HOUR_LATER)
    project.post_observations(run, evals(0.5, 0.4, 0.3, start=5), ONE_HOUR_LATER)
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 2)
    assert project.load_decision_states(run) == ["requested", "parked", "undone"]


def test_person_can_stop_a_parked_run(project: ProjectFixture) -> None:
    """The same decision then requests a stop; once it is confirmed the run is stopped."""
    run, decision = park_run(project)
    ordered = project.order_stop(run, StopOrdered(ONE_HOUR_LATER, "dana", "no more of this"))
    assert (ordered.id, ordered.action, ordered.state) == (decision.id, Action.STOP, DecisionState.REQUESTED)
    assert ordered.stops
    assert load_event_types(project, run).count("run.stop_requested") == 1
    assert project.record_report(decision, DecisionState.CONFIRMED) is DecisionState.CONFIRMED
    assert project.load_run(run).status is RunStatus.STOPPED


@pytest.mark.parametrize("reopened", [False, True], ids=["resumed", "reopened by another job"])
def test_parked_run_that_goes_on_despite_its_stop_is_watched(project: ProjectFixture, reopened: bool) -> None:
    """If the job starts again after its stop was requested, nothing parks it: it is checked and can be parked again."""
    run, decision = park_run(project, name="ppo-7b", job="slurm 4711")
    project.order_stop(run, StopOrdered(ONE_HOUR_LATER, "dana", "no more of this"))
    assert project.record_report(decision, DecisionState.ACKNOWLEDGED) is DecisionState.ACKNOWLEDGED
    assert stale_runs.check_due_runs(project.database, ONE_HOUR_LATER) == 1  # as long as it is parked, its last check
    if reopened:
        project.open_run("ppo-7b", job="slurm 4712", resume=Resume.ALLOW)
    else:
        project.submit(run, Resumed(4), ONE_HOUR_LATER)
    resumed = project.load_run(run)
    assert (resumed.status, resumed.attempt) == (RunStatus.RUNNING, 2)
    assert stale_runs.check_due_runs(project.database, ONE_HOUR_LATER + timedelta(hours=2)) == 1
    assert load_event_types(project, run)[-1] == "run.stale"
    again = project.post_observations(run, evals(0.95, 0.8, 0.7, 0.6, start=5), ONE_HOUR_LATER).decision
    assert again is not None
    assert (again.attempt, again.action) == (2, Action.PARK)


def test_late_park_of_an_earlier_attempt_leaves_the_run_running(project: ProjectFixture) -> None:
    """A receiver that parked the previous job after all says nothing about the present one."""
    run, decision = project.open_declining_run(policy="set-aside")
    assert project.record_report(decision, DecisionState.FAILED) is DecisionState.FAILED
    project.submit(run, Resumed(1), ONE_HOUR_LATER)
    assert project.record_report(decision, DecisionState.PARKED) is DecisionState.PARKED
    assert project.load_run(run).status is RunStatus.RUNNING


def test_undoing_an_earlier_stop_leaves_a_run_parked(project: ProjectFixture) -> None:
    """A person who takes back the decision of an earlier attempt does not say that the present one returns."""
    run, decision = project.open_declining_run(policy="set-aside")
    assert project.record_report(decision, DecisionState.FAILED) is DecisionState.FAILED
    project.submit(run, Resumed(1), ONE_HOUR_LATER)
    again = project.post_observations(run, evals(0.8, 0.7, 0.6, start=2), ONE_HOUR_LATER).decision
    assert again is not None
    assert project.record_report(again, DecisionState.PARKED) is DecisionState.PARKED
    assert undo_decision(project, decision) is DecisionState.UNDONE
    assert project.load_run(run).status is RunStatus.PARKED


def test_parked_hours_are_counted(project: ProjectFixture) -> None:
    """The figures count the delay of a run that returned, and the GPU-hours freed by one that was stopped."""
    labels = {"gpus": "4"}
    returned, _ = park_run(project, labels=labels)
    project.post_observations(returned, RISING, ONE_HOUR_LATER + timedelta(hours=3))
    stopped, decision = park_run(project, labels=labels)
    order = StopOrdered(ONE_HOUR_LATER + timedelta(hours=2), "dana", "no more of this")
    project.order_stop(stopped, order)
    project.record_report(decision, DecisionState.CONFIRMED, order.at)
    first, second = project.load_case(returned), project.load_case(stopped)
    with project.database.reading() as tx:
        (total,) = figures.load_figures(tx, project.id, CaseFilter())
    assert (first.parked_seconds, first.gpu_hours) == (3 * 3600.0, 4.0)  # it trained for an hour before it was parked
    assert (first.treatment, second.treatment) == (Treatment.PREVENTED, Treatment.STOPPED)
    assert second.parked_seconds == 2 * 3600.0
    assert total.hours.parked == 4 * 5


def test_parked_hours_before_an_attempt_do_not_count(project: ProjectFixture) -> None:
    """The GPU-hours of an attempt leave out the time parked before it started."""
    run, decision = park_run(project, labels={"gpus": "4"})
    restarted, ordered = ONE_HOUR_LATER + timedelta(hours=3), ONE_HOUR_LATER + timedelta(hours=4)
    project.submit(run, Resumed(1), restarted)
    project.order_stop(run, StopOrdered(ordered, "dana", "no more of this"))
    project.record_report(decision, DecisionState.CONFIRMED, ordered + timedelta(hours=1))
    case = project.load_case(run, attempt=2)
    assert (case.parked_seconds, case.gpu_hours) == (4 * 3600.0, 4.0)  # stopping took an hour


def test_requested_park_cannot_become_a_stop(project: ProjectFixture) -> None:
    """While a receiver is parking the job, an order to stop is refused with what to do."""
    run, _ = project.open_declining_run(policy="set-aside")
    with pytest.raises(Conflict, match="once it is parked"):
        project.order_stop(run, StopOrdered(ONE_HOUR_LATER, "dana", ""))


def test_run_that_recovers_in_the_veto_window_is_not_parked(database: Database) -> None:
    """If the eval rises within the veto window nothing is sent, and the run can be parked later."""
    project = set_up_parking(database, veto_window_seconds=60.0)
    run, decision = project.open_declining_run(policy="set-aside")
    assert decision.state is DecisionState.PENDING
    project.post_observations(run, RISING)
    assert project.load_decision_states(run) == ["pending", "moot"]
    assert (project.load_run(run).status, project.load_run(run).attempt) == (RunStatus.RUNNING, 2)
    assert project.end_windows(ONE_HOUR_LATER) == 0


def test_park_can_be_vetoed(database: Database) -> None:
    """Within the veto window a person can veto a park like a stop."""
    project = set_up_parking(database, veto_window_seconds=60.0)
    run, decision = project.open_declining_run(policy="set-aside")
    project.apply_command(decision, Vetoed(NOW, "dana", "a known dip"))
    project.post_observations(run, evals(0.5, 0.4, start=5))
    assert project.load_decision_states(run) == ["pending", "vetoed"]


class FakeHistogram(Histogram):
    """Calls a function when the detectors' time is known, which is just before what they said is saved."""

    def __init__(self, veto: Callable[[], object]) -> None:
        super().__init__("detector_seconds", "", registry=None)
        self._veto = veto

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._veto()


def test_veto_during_the_recovery_counts(database: Database) -> None:
    """A park that is vetoed after its run's recovery was computed, and before it is saved, stays vetoed."""
    project = set_up_parking(database, veto_window_seconds=60.0)
    run, decision = project.open_declining_run(policy="set-aside")
    metrics = ServiceMetrics()
    metrics.detector_seconds = FakeHistogram(
        lambda: project.apply_command(decision, Vetoed(NOW, "dana", "a known dip"))
    )
    committer = Committer(database, RunCache(), lambda: NOW, metrics)
    with running_in_thread(committer):
        committer.submit_and_wait(Message(project.id, run.id, Observations(tuple(RISING))))
    assert project.load_decision_states(run) == ["pending", "vetoed"]
    assert project.load_run(run).attempt == 1


def test_parked_run_raises_a_weekly_alarm(project: ProjectFixture) -> None:
    """Every week that a job is parked sends `run.park_overdue`; the run stays parked."""
    run, _ = park_run(project)
    for weeks in (1, 2):
        deadlines.process_overdue(project.database, ONE_HOUR_LATER + timedelta(days=7 * weeks, minutes=weeks))
        assert load_event_types(project, run).count("run.park_overdue") == weeks
    assert project.load_run(run).status is RunStatus.PARKED


def test_unresumed_job_becomes_stale(project: ProjectFixture) -> None:
    """If the scheduler cannot resume a job, its run becomes stale, which sends an event."""
    run, decision = park_run(project)
    assert undo_decision(project, decision) is DecisionState.UNDONE
    assert stale_runs.check_due_runs(project.database, ONE_HOUR_LATER + timedelta(hours=2)) == 1
    assert load_event_types(project, run)[-1] == "run.stale"


def test_run_that_ends_while_parked_makes_the_park_moot(project: ProjectFixture) -> None:
    """A parked job that keeps idle GPUs may complete: the decision is moot, and nothing is sent."""
    run, _ = park_run(project)
    project.finish_run(run, now=ONE_HOUR_LATER)
    assert project.load_run(run).status is RunStatus.COMPLETED
    assert project.load_decision_states(run) == ["requested", "parked", "moot"]
    assert "run.resume_requested" not in load_event_types(project, run)


def test_job_attaches_to_its_parked_run(project: ProjectFixture) -> None:
    """The requeued job opens its run by the same name: it is the same run, parked still, and not another one."""
    run, _ = park_run(project, name="ppo-7b", job="slurm 4711")
    attached = project.open_run("ppo-7b", policy="set-aside", job="slurm 4711")
    assert (attached.id, attached.status) == (run.id, RunStatus.PARKED)
