"""Commands of people and reports of receivers on decisions."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from evalstop_service.decisions import commands, pause
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported, StopOrdered, Undone, Vetoed
from evalstop_service.rules.run_descriptions import RunDescription
from evalstop_service.store import cases, tables
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.queue import leases
from evalstop_service.store.runs import Run

from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ONE_HOUR_LATER,
    ProjectFixture,
    load_stop_delivery_states,
)


def test_veto_in_the_window_cancels_the_stop(veto_project: ProjectFixture) -> None:
    """A veto within the window cancels the waiting deliveries; repeated, it changes nothing."""
    run = veto_project.open_run()
    decision = veto_project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    assert decision.state == DecisionState.PENDING
    assert load_stop_delivery_states(veto_project) == ["waiting"]
    for _ in range(2):
        vetoed = commands.apply_command(
            veto_project.database, veto_project.id, decision.id, Vetoed(NOW, "dana", "broken eval")
        )
        assert vetoed.state == DecisionState.VETOED
    assert load_stop_delivery_states(veto_project) == ["cancelled"]
    with veto_project.database.transaction() as tx:
        bodies = [claimed.body for claimed in leases.claim_deliveries(tx, ONE_HOUR_LATER, 60.0, 10, 10)]
    assert not any("run.stop_requested" in body for body in bodies)


def test_veto_after_the_window_is_refused(veto_project: ProjectFixture) -> None:
    """Once the veto window has ended, the stop can no longer be vetoed."""
    run = veto_project.open_run()
    decision = veto_project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    with pytest.raises(Conflict, match="veto window"):
        commands.apply_command(veto_project.database, veto_project.id, decision.id, Vetoed(ONE_HOUR_LATER, "dana", ""))
    assert load_stop_delivery_states(veto_project) == ["waiting"]


def record_report(project: ProjectFixture, decision_id: UUID, state: DecisionState) -> DecisionState:
    report = Reported(ONE_HOUR_LATER, state, "receiver", "as seen", {"exit_status": -15})
    return DecisionState(commands.record_report(project.database, project.id, decision_id, report).state)


def test_confirmed_report_stops_the_run_once(veto_project: ProjectFixture) -> None:
    """A confirmation ends the run with one event; repeated, it changes nothing; contradicted, it is refused."""
    run = veto_project.open_run()
    decision = veto_project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    assert record_report(veto_project, decision.id, DecisionState.FAILED) == DecisionState.FAILED
    assert record_report(veto_project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert record_report(veto_project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict):
        record_report(veto_project, decision.id, DecisionState.FAILED)
    assert veto_project.load_run(run).status == "stopped"
    assert len(veto_project.load_events(run, "run.stopped")) == 1
    states = [row["state"] for row in veto_project.load_rows(tables.decision_changes, run)]
    assert states == ["pending", "requested", "failed", "confirmed"]


def undo_decision(project: ProjectFixture, run: Run) -> str:
    decision = project.load_decision(run)
    return commands.apply_command(
        project.database, project.id, decision.id, Undone(ONE_HOUR_LATER, "dana", "the eval was broken")
    ).state


def finish_run(project: ProjectFixture, run: Run) -> str:
    commands.finish_run(project.database, project.id, run.id, "completed", NOW)
    return project.load_decision(run).state


def test_end_of_a_run_is_announced_once(project: ProjectFixture) -> None:
    """A run that its trainer ended sends `run.completed` or `run.failed` with its owner; one that obeyed,
    `run.stopped`."""
    event_types = {"completed": "run.completed", "failed": "run.failed"}
    for status, event_type in event_types.items():
        run = project.open_run(description=RunDescription(owner="dana@example.org", group="seeds"))
        for _ in range(2):
            commands.finish_run(project.database, project.id, run.id, status, NOW)
        (event,) = [row for row in project.load_rows(tables.events, run) if row["type"] in event_types.values()]
        assert event["type"] == event_type
        event_run = json.loads(event["body"])["data"]["run"]
        assert (event_run["owner"], event_run["group"]) == ("dana@example.org", "seeds")
    run = project.open_run()
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    commands.finish_run(project.database, project.id, run.id, "completed", ONE_HOUR_LATER, obeyed=decision.id)
    assert {row["type"] for row in project.load_rows(tables.events, run)} & {*event_types.values(), "run.stopped"} == {
        "run.stopped"
    }


def test_obedient_trainer_stops_its_run(project: ProjectFixture) -> None:
    """A trainer that obeys the decision it saw stops its run; a receiver may confirm it afterwards."""
    run = project.open_run(labels={"gpus": "8"}, total_steps=1000)
    project.post_observations(run, DECLINING_EVALS)
    decision = project.load_decision(run)

    def finish_obeying(run: Run, obeyed: UUID) -> str:
        return commands.finish_run(
            project.database, project.id, run.id, "completed", ONE_HOUR_LATER, obeyed=obeyed, actor="key trainers"
        ).status

    assert finish_obeying(run, decision.id) == "stopped"
    assert finish_obeying(run, decision.id) == "stopped"
    obeyed = project.load_decision(run)
    assert (obeyed.state, obeyed.deadline_at) == ("obeyed", None)
    assert obeyed.state_reason == "the trainer saw the stop and ended the run by itself"
    assert len(project.load_events(run, "run.stopped")) == 1
    (case,) = project.load_rows(tables.cases, run)
    assert (case["treatment"], case["gpu_hours_saved"] is None) == ("stopped", False)
    assert record_report(project, decision.id, DecisionState.ACKNOWLEDGED) == DecisionState.OBEYED
    assert record_report(project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert project.load_run(run).ended_at == ONE_HOUR_LATER
    assert len(project.load_events(run, "run.stopped")) == 1
    other = project.open_run()
    project.post_observations(other, DECLINING_EVALS)
    assert finish_obeying(other, decision.id) == "completed"
    assert project.load_decision(other).state == "moot"


def test_acknowledged_stop_can_still_fail(veto_project: ProjectFixture) -> None:
    """An acknowledgement extends the deadline once; afterwards the stop can still fail."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    decision = veto_project.load_decision(run)
    for seconds in (120.0, 86_400.0):
        report = Reported(ONE_HOUR_LATER, DecisionState.ACKNOWLEDGED, "receiver", "found", {"job": "4711"}, seconds)
        state = commands.record_report(veto_project.database, veto_project.id, decision.id, report).state
        assert state == DecisionState.ACKNOWLEDGED
    assert veto_project.load_decision(run).deadline_at == ONE_HOUR_LATER + timedelta(seconds=120 + 900)
    assert veto_project.load_decision(run).stops(ONE_HOUR_LATER)
    assert record_report(veto_project, decision.id, DecisionState.FAILED) == DecisionState.FAILED
    assert veto_project.load_decision(run).deadline_at is None
    with pytest.raises(Conflict, match="failed; it cannot become acknowledged"):
        record_report(veto_project, decision.id, DecisionState.ACKNOWLEDGED)


def test_undone_stop_requests_a_resume(project: ProjectFixture) -> None:
    """After an undo the trainer may go on, and receivers are asked to resume the job."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    project.post_observations(run, DECLINING_EVALS)
    for _ in range(2):
        assert undo_decision(project, run) == DecisionState.UNDONE
    assert not project.load_decision(run).stops(ONE_HOUR_LATER)
    (event,) = project.load_events(run, "run.resume_requested")
    data = json.loads(event["body"])["data"]
    assert (data["decision"]["state"], data["best_checkpoint"]["uri"]) == ("undone", "file:///1")


def test_undo_cancels_waiting_deliveries(veto_project: ProjectFixture) -> None:
    """A stop that still waits for its endpoint is cancelled by an undo."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    with pytest.raises(Conflict, match="veto it instead"):
        commands.apply_command(
            veto_project.database, veto_project.id, veto_project.load_decision(run).id, Undone(NOW, "dana", "")
        )
    assert undo_decision(veto_project, run) == DecisionState.UNDONE
    assert load_stop_delivery_states(veto_project) == ["cancelled"]


def test_reports_after_an_undo_are_only_recorded(project: ProjectFixture) -> None:
    """Reports of a receiver that had started are recorded once each, and the run goes on."""
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS)
    undo_decision(project, run)
    for state in (DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED, DecisionState.CONFIRMED):
        assert record_report(project, project.load_decision(run).id, state) == DecisionState.UNDONE
    reported_states = [row["details"].get("reported") for row in project.load_rows(tables.decision_changes, run)]
    assert reported_states == [None, None, "acknowledged", "confirmed"]
    assert project.load_run(run).status == "running"
    assert project.load_events(run, "run.stopped") == []


def test_ended_run_makes_a_pending_stop_moot(veto_project: ProjectFixture) -> None:
    """When the run ends its pending stop is cancelled; a later confirmation is still accepted."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    assert finish_run(veto_project, run) == DecisionState.MOOT
    assert load_stop_delivery_states(veto_project) == ["cancelled"]
    assert (
        record_report(veto_project, veto_project.load_decision(run).id, DecisionState.CONFIRMED)
        == DecisionState.CONFIRMED
    )


def test_requested_stop_outlives_the_end_of_its_run(project: ProjectFixture, veto_project: ProjectFixture) -> None:
    """If a receiver may have the stop, it stays requested after the run ends; otherwise it is moot."""
    run_without_receiver = project.open_run()
    project.post_observations(run_without_receiver, DECLINING_EVALS)
    assert finish_run(project, run_without_receiver) == DecisionState.MOOT
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    commands.finish_run(veto_project.database, veto_project.id, run.id, "completed", ONE_HOUR_LATER)
    assert veto_project.load_decision(run).state == DecisionState.REQUESTED
    assert (
        record_report(veto_project, veto_project.load_decision(run).id, DecisionState.CONFIRMED)
        == DecisionState.CONFIRMED
    )


def order_stop(project: ProjectFixture, run: Run, now: datetime = ONE_HOUR_LATER) -> Decision:
    return project.order_stop(run, StopOrdered(now, "dana", "the reward is broken"))


def test_person_can_stop_any_run(veto_project: ProjectFixture) -> None:
    """A person's stop is a decision, requested at once, reported to the trainer and confirmed like others."""
    run = veto_project.open_run(mode="shadow")
    assert not veto_project.post_observations(run, DECLINING_EVALS[:2]).decision
    decision = order_stop(veto_project, run)
    assert (decision.state, decision.verdict.reason) == (DecisionState.REQUESTED, "dana: the reward is broken")
    with pytest.raises(Conflict, match="requested already"):
        order_stop(veto_project, run)
    assert load_stop_delivery_states(veto_project) == ["waiting"]
    receipt = veto_project.post_observations(run, DECLINING_EVALS[2:])
    assert receipt.decision is not None, "a later verdict makes no second decision"
    assert receipt.decision.id == decision.id
    assert receipt.decision.stops(ONE_HOUR_LATER)
    assert record_report(veto_project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict, match="has ended"):
        order_stop(veto_project, run)
    with veto_project.database.reading() as tx:
        case = cases.find_case(tx, run.id, 1)
    assert case is not None
    assert case.decision_id is None, "a person's stop is not counted for the policy"


def test_person_can_stop_a_shadow_decision(project: ProjectFixture) -> None:
    """A run with a shadow decision is stopped under that decision, and its trainer sees it."""
    run = project.open_run(mode="shadow")
    shadow = project.post_observations(run, DECLINING_EVALS).decision
    assert shadow is not None
    assert shadow.state == DecisionState.SHADOW
    assert order_stop(project, run).id == shadow.id
    receipt = project.post_observations(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.stops(ONE_HOUR_LATER)


def test_ordered_stop_skips_the_veto_window(veto_project: ProjectFixture) -> None:
    """A pending stop is requested at once, and its delivery for the end of the veto window is cancelled."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    assert order_stop(veto_project, run, NOW).state == DecisionState.REQUESTED
    assert sorted(load_stop_delivery_states(veto_project)) == ["cancelled", "waiting"]


def test_person_can_stop_a_run_again(project: ProjectFixture) -> None:
    """A run that goes on after an undone stop is stopped in a new attempt, under a new decision."""
    run = project.open_run()
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    commands.apply_command(project.database, project.id, decision.id, Undone(ONE_HOUR_LATER, "dana", "no"))
    again = order_stop(project, run)
    assert (again.attempt, again.state) == (2, DecisionState.REQUESTED)
    assert again.id != decision.id
    stops = [event for event in project.load_events(run, "run.stop_requested") if event["decision_id"] == again.id]
    assert len(stops) == 1
    receipt = project.post_observations(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.id == again.id


def test_ordered_stop_is_refused_while_paused(project: ProjectFixture) -> None:
    """While the project is paused no run can be stopped, and none starts a new attempt for it."""
    run, other = project.open_run("one"), project.open_run("other")
    decision = project.post_observations(other, DECLINING_EVALS).decision
    assert decision is not None
    commands.apply_command(project.database, project.id, decision.id, Undone(ONE_HOUR_LATER, "dana", "no"))
    pause.pause_project(project.database, project.id, "dana", "", ONE_HOUR_LATER)
    for each in (run, other):
        with pytest.raises(Conflict, match="paused"):
            order_stop(project, each)
