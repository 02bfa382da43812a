"""Several runs in one job: a stop ends the job only once all of them are to be stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from evalstop_service.decisions import deadlines, holds, veto_windows
from evalstop_service.domain.decision_commands import Released, Vetoed
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.store import tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.runs import Run

from tests.service.decisions.test_parking import PARKING_POLICY
from tests.service.event_check import check_events
from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ONE_HOUR_LATER,
    ProjectFixture,
    lift_stop_limits,
    set_up_project,
)

SLURM = {"slurm_job_id": "7", "slurm_cluster": "alpha", "gpus": "8"}
WINDOW = 600.0


@pytest.fixture
def project(database: Database) -> Iterator[ProjectFixture]:
    """A project with a veto window; afterwards its events are validated against their schemas."""
    project = set_up_project(database, veto_window_seconds=WINDOW)
    project.add_policy(PARKING_POLICY)
    project.add_endpoint()
    lift_stop_limits(database)
    yield project
    check_events(database)


def open_in_job(project: ProjectFixture, name: str, job: str | None = None, **options: Any) -> Run:
    labels = options.pop("labels", SLURM)
    return project.open_run(name, labels=labels, job=job, **options)


def read_state(project: ProjectFixture, run: Run) -> tuple[DecisionState, list[str]]:
    decision = project.load_decision(run)
    return decision.state, decision.guard_kinds


HELD = (DecisionState.ON_HOLD, ["shared_job"])
PENDING: tuple[DecisionState, list[str]] = (DecisionState.PENDING, [])


def test_stop_waits_until_all_runs_of_its_job_are_to_be_stopped(project: ProjectFixture) -> None:
    """The first of two stops is on hold and names the other run; the second releases both, in one veto window."""
    first, second = open_in_job(project, "a"), open_in_job(project, "b")
    project.post_observations(first, DECLINING_EVALS)
    assert read_state(project, first) == HELD
    assert project.load_decision(first).state_reason == "1 other live run in this job: b"
    later = NOW + timedelta(minutes=2)
    deadlines.process_overdue(project.database, later)
    assert read_state(project, first) == HELD

    project.post_observations(second, DECLINING_EVALS, later)
    assert read_state(project, second) == HELD
    deadlines.process_overdue(project.database, later)
    assert [read_state(project, run) for run in (first, second)] == [PENDING, PENDING]
    assert {project.load_decision(run).due_at for run in (first, second)} == {later + timedelta(seconds=WINDOW)}
    assert project.end_windows(ONE_HOUR_LATER) == 2
    (event,) = project.load_events(first, "run.stop_requested")
    assert json.loads(event["body"])["data"]["job"] == {"ends": "job", "other_runs": []}


@pytest.mark.parametrize("end", ["completed", "failed"])
def test_stop_is_sent_once_the_other_runs_have_ended(project: ProjectFixture, end: str) -> None:
    """The end of the other run clears the guard."""
    turning, healthy = open_in_job(project, "a"), open_in_job(project, "b")
    project.post_observations(turning, DECLINING_EVALS)
    project.finish_run(healthy, end)
    deadlines.process_overdue(project.database, NOW + timedelta(minutes=1))
    assert read_state(project, turning) == PENDING


@pytest.mark.parametrize(
    ("others", "is_shared"),
    [
        ({**SLURM, "slurm_cluster": "beta"}, False),
        ({**SLURM, "slurm_job_id": "8"}, False),
        ({**SLURM, "slurm_step_id": "1"}, True),
        ({"receiver": "r"}, False),
    ],
)
def test_only_runs_of_the_same_job_hold_a_stop(
    project: ProjectFixture, others: dict[str, str], is_shared: bool
) -> None:
    """A run in another job, cluster or receiver holds nothing."""
    turning = open_in_job(project, "a", "one")
    open_in_job(project, "b", "one", labels=others)
    project.post_observations(turning, DECLINING_EVALS)
    assert read_state(project, turning) == (HELD if is_shared else PENDING)


def test_trainers_name_for_its_job_counts_without_labels(project: ProjectFixture) -> None:
    """Two runs of one process, which no label describes, are in one job."""
    turning = open_in_job(project, "a", "process:1", labels={})
    open_in_job(project, "b", "process:1", labels={})
    open_in_job(project, "c", "process:2", labels={})
    project.post_observations(turning, DECLINING_EVALS)
    assert project.load_decision(turning).state_reason == "1 other live run in this job: b"


@pytest.mark.parametrize(
    ("job", "label", "kind"),
    [(SLURM, "slurm_step_id", "step"), ({"receiver": "r", "gpus": "8"}, "process_id", "process")],
)
def test_run_that_names_a_part_of_its_job_is_stopped_alone(
    project: ProjectFixture, job: dict[str, str], label: str, kind: str
) -> None:
    """The request says that only the step or the process may end; a run in the same part, or in none, holds it."""
    turning, healthy = (open_in_job(project, name, labels={**job, label: name}) for name in "ab")
    open_in_job(project, "batch", labels={**job, label: "batch"})
    project.post_observations(turning, DECLINING_EVALS)
    assert read_state(project, turning) == PENDING
    assert project.end_windows(ONE_HOUR_LATER) == 1
    (event,) = project.load_events(turning, "run.stop_requested")
    assert json.loads(event["body"])["data"]["job"] == {"ends": kind, "other_runs": ["b", "batch"]}
    # The job of a run that says nothing, or is in no part, can only be ended as a whole.
    open_in_job(project, "anywhere", labels=job)
    project.post_observations(healthy, DECLINING_EVALS)
    assert project.load_decision(healthy).state_reason == "1 other live run in this job: anywhere"


def test_parking_reaches_the_whole_job(project: ProjectFixture) -> None:
    """A job is parked as a whole, whatever part a run names."""
    turning = open_in_job(project, "a", labels={**SLURM, "slurm_step_id": "0"}, policy="set-aside")
    open_in_job(project, "b", labels={**SLURM, "slurm_step_id": "1"})
    project.post_observations(turning, DECLINING_EVALS)
    assert read_state(project, turning) == HELD


@pytest.mark.parametrize("change", ["a run is opened", "the other stop is vetoed"])
def test_pending_stop_is_held_when_its_job_gets_a_run_that_goes_on(project: ProjectFixture, change: str) -> None:
    """In the veto window as well, and at its end nothing is sent."""
    turning = open_in_job(project, "a")
    if change == "a run is opened":
        project.post_observations(turning, DECLINING_EVALS)
        assert read_state(project, turning) == PENDING
        open_in_job(project, "b")
    else:
        other = open_in_job(project, "b")
        for run in (turning, other):
            project.post_observations(run, DECLINING_EVALS)
        deadlines.process_overdue(project.database, NOW)
        assert project.apply_command(project.load_decision(other), Vetoed(NOW, "dana", "new data")) == "vetoed"
    project.end_windows(ONE_HOUR_LATER)
    assert read_state(project, turning) == HELD


def test_person_may_stop_the_whole_job(project: ProjectFixture) -> None:
    """A release goes out despite the other runs, and the request names them."""
    turning = open_in_job(project, "a")
    open_in_job(project, "b")
    project.post_observations(turning, DECLINING_EVALS)
    assert project.apply_command(project.load_decision(turning), Released(NOW, "dana", "both")) == "pending"
    holds.withdraw_stops(project.database, NOW)
    project.end_windows(ONE_HOUR_LATER)
    (event,) = project.load_events(turning, "run.stop_requested")
    assert json.loads(event["body"])["data"]["job"] == {"ends": "job", "other_runs": ["b"]}


def test_gpus_of_a_job_count_once(project: ProjectFixture) -> None:
    """Two stopped runs of one job with 8 GPUs save together what one run alone would have saved."""
    saved = []
    for names in ("a", "bc"):
        runs = [open_in_job(project, name, labels={**SLURM, "slurm_job_id": names}, total_steps=40) for name in names]
        for run in runs:
            project.post_observations(run, DECLINING_EVALS, NOW + timedelta(minutes=30))
        deadlines.process_overdue(project.database, NOW + timedelta(minutes=30))
        with project.database.transaction() as tx:
            tx.execute(tables.decisions.update().values(state="requested").where(tables.decisions.c.state == "pending"))
        for run in runs:
            project.record_report(project.load_decision(run), DecisionState.CONFIRMED)
        saved.append(sum(project.load_case(run).gpu_hours_saved or 0.0 for run in runs))
    assert saved[0] > 0
    assert saved[1] == pytest.approx(saved[0])


def test_stop_waits_for_the_longest_veto_window_of_its_job(project: ProjectFixture) -> None:
    """A person has one of two stops of a job wait: the other one, which would end both runs, waits as well."""
    first, second = open_in_job(project, "a"), open_in_job(project, "b")
    for run in (first, second):
        project.post_observations(run, DECLINING_EVALS)
    deadlines.process_overdue(project.database, NOW)
    with project.database.transaction() as tx:
        longer = tables.decisions.update().where(tables.decisions.c.run_id == second.id)
        tx.execute(longer.values(due_at=ONE_HOUR_LATER + timedelta(hours=1)))
    for heard_until, state in ((ONE_HOUR_LATER, "pending"), (ONE_HOUR_LATER + timedelta(hours=1), "requested")):

        def read_time(_: Transaction, now: datetime = heard_until) -> datetime:
            return now

        veto_windows.request_stops(project.database, heard_until, read_time)
        assert [read_state(project, run)[0] for run in (first, second)] == [state, state]
