"""What people and receivers say of a decision."""

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


def test_veto_within_grace(veto_project: ProjectFixture) -> None:
    """Within the veto window a person can say no, twice without harm; what waits to be sent is cancelled."""
    run = veto_project.open_run()
    decision = veto_project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    assert decision.state == DecisionState.PENDING
    assert load_stop_delivery_states(veto_project) == ["waiting"]
    for _ in range(2):
        said = commands.apply_command(
            veto_project.database, veto_project.id, decision.id, Vetoed(NOW, "dana", "broken eval")
        )
        assert said.state == DecisionState.VETOED
    assert load_stop_delivery_states(veto_project) == ["cancelled"]
    with veto_project.database.transaction() as tx:
        bodies = [claimed.body for claimed in leases.claim_deliveries(tx, ONE_HOUR_LATER, 60.0, 10, 10)]
    assert not any("run.stop_requested" in body for body in bodies)


def test_no_veto_after_grace(veto_project: ProjectFixture) -> None:
    """Once the veto window is over the stop can no longer be taken back."""
    run = veto_project.open_run()
    decision = veto_project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    with pytest.raises(Conflict, match="veto window"):
        commands.apply_command(veto_project.database, veto_project.id, decision.id, Vetoed(ONE_HOUR_LATER, "dana", ""))
    assert load_stop_delivery_states(veto_project) == ["waiting"]


def report(project: ProjectFixture, decision_id: UUID, state: DecisionState) -> DecisionState:
    said = Reported(ONE_HOUR_LATER, state, "receiver", "as seen", {"exit_status": -15})
    return DecisionState(commands.record_report(project.database, project.id, decision_id, said).state)


def test_reports_follow_the_life_of_a_decision(veto_project: ProjectFixture) -> None:
    """A receiver's report ends the run and is told once; repeated it changes nothing, contradicted it is refused."""
    run = veto_project.open_run()
    decision = veto_project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    assert report(veto_project, decision.id, DecisionState.FAILED) == DecisionState.FAILED
    assert report(veto_project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert report(veto_project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict):
        report(veto_project, decision.id, DecisionState.FAILED)
    assert veto_project.load_run(run).status == "stopped"
    assert len(veto_project.load_events(run, "run.stopped")) == 1
    states = [row["state"] for row in veto_project.load_rows(tables.decision_changes, run)]
    assert states == ["pending", "requested", "failed", "confirmed"]


def decided(project: ProjectFixture, run: Run) -> Decision:
    found = project.find_decision(run)
    assert found is not None
    return found


def undo(project: ProjectFixture, run: Run) -> str:
    decision = decided(project, run)
    return commands.apply_command(
        project.database, project.id, decision.id, Undone(ONE_HOUR_LATER, "dana", "the eval was broken")
    ).state


def finish(project: ProjectFixture, run: Run) -> str:
    commands.finish_run(project.database, project.id, run.id, "completed", NOW)
    return decided(project, run).state


def test_the_end_of_a_run_is_announced_once(project: ProjectFixture) -> None:
    """A run that its trainer ended is announced as completed or failed, with its owner; one that obeyed is stopped."""
    ends = {"completed": "run.completed", "failed": "run.failed"}
    for status, event_type in ends.items():
        run = project.open_run(description=RunDescription(owner="dana@example.org", group="seeds"))
        for _ in range(2):
            commands.finish_run(project.database, project.id, run.id, status, NOW)
        (event,) = [row for row in project.load_rows(tables.events, run) if row["type"] in ends.values()]
        assert event["type"] == event_type
        told = json.loads(event["body"])["data"]["run"]
        assert (told["owner"], told["group"]) == ("dana@example.org", "seeds")
    run = project.open_run()
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    commands.finish_run(project.database, project.id, run.id, "completed", ONE_HOUR_LATER, obeyed=decision.id)
    assert {row["type"] for row in project.load_rows(tables.events, run)} & {*ends.values(), "run.stopped"} == {
        "run.stopped"
    }


def test_a_trainer_that_obeys_stops_its_run(project: ProjectFixture) -> None:
    """The decision that the trainer saw is obeyed and the run stopped, which a receiver may confirm afterwards."""
    run = project.open_run(labels={"gpus": "8"}, total_steps=1000)
    project.post_observations(run, DECLINING_EVALS)
    decision = decided(project, run)

    def finish_obeying(run: Run, obeyed: UUID) -> str:
        return commands.finish_run(
            project.database, project.id, run.id, "completed", ONE_HOUR_LATER, obeyed=obeyed, actor="key trainers"
        ).status

    assert finish_obeying(run, decision.id) == "stopped"
    assert finish_obeying(run, decision.id) == "stopped"
    obeyed = decided(project, run)
    assert (obeyed.state, obeyed.deadline_at) == ("obeyed", None)
    assert obeyed.state_reason == "the trainer saw the stop and ended the run by itself"
    assert len(project.load_events(run, "run.stopped")) == 1
    (case,) = project.load_rows(tables.cases, run)
    assert (case["treatment"], case["gpu_hours_saved"] is None) == ("stopped", False)
    assert report(project, decision.id, DecisionState.ACKNOWLEDGED) == DecisionState.OBEYED
    assert report(project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert project.load_run(run).ended_at == ONE_HOUR_LATER
    assert len(project.load_events(run, "run.stopped")) == 1
    other = project.open_run()
    project.post_observations(other, DECLINING_EVALS)
    assert finish_obeying(other, decision.id) == "completed"
    assert decided(project, other).state == "moot"


def test_a_stop_that_is_under_way_is_acknowledged(veto_project: ProjectFixture) -> None:
    """A receiver that has begun says so and for how long; said again it changes nothing, and it may still fail."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    decision = decided(veto_project, run)
    for seconds in (120.0, 86_400.0):
        said = Reported(ONE_HOUR_LATER, DecisionState.ACKNOWLEDGED, "receiver", "found", {"job": "4711"}, seconds)
        said_state = commands.record_report(veto_project.database, veto_project.id, decision.id, said).state
        assert said_state == DecisionState.ACKNOWLEDGED
    assert decided(veto_project, run).deadline_at == ONE_HOUR_LATER + timedelta(seconds=120 + 900)
    assert decided(veto_project, run).stops(ONE_HOUR_LATER)
    assert report(veto_project, decision.id, DecisionState.FAILED) == DecisionState.FAILED
    assert decided(veto_project, run).deadline_at is None
    with pytest.raises(Conflict, match="failed; it cannot become acknowledged"):
        report(veto_project, decision.id, DecisionState.ACKNOWLEDGED)


def test_what_was_handed_out_is_undone(project: ProjectFixture) -> None:
    """The trainer may go on, receivers are asked to release the job, and what was not sent yet is not sent."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    project.post_observations(run, DECLINING_EVALS)
    for _ in range(2):
        assert undo(project, run) == DecisionState.UNDONE
    assert not decided(project, run).stops(ONE_HOUR_LATER)
    (event,) = project.load_events(run, "run.resume_requested")
    data = json.loads(event["body"])["data"]
    assert (data["decision"]["state"], data["best_checkpoint"]["uri"]) == ("undone", "file:///1")


def test_undone_it_is_not_sent(veto_project: ProjectFixture) -> None:
    """A stop that waits for an endpoint that is away is cancelled."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    with pytest.raises(Conflict, match="veto it instead"):
        commands.apply_command(
            veto_project.database, veto_project.id, decided(veto_project, run).id, Undone(NOW, "dana", "")
        )
    assert undo(veto_project, run) == DecisionState.UNDONE
    assert load_stop_delivery_states(veto_project) == ["cancelled"]


def test_reports_after_an_undo_are_kept_and_change_nothing(project: ProjectFixture) -> None:
    """The receiver that had begun is not told off; what it says is on record once, and the run goes on."""
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS)
    undo(project, run)
    for state in (DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED, DecisionState.CONFIRMED):
        assert report(project, decided(project, run).id, state) == DecisionState.UNDONE
    rows = [row["details"].get("reported") for row in project.load_rows(tables.decision_changes, run)]
    assert rows == [None, None, "acknowledged", "confirmed"]
    assert project.load_run(run).status == "running"
    assert project.load_events(run, "run.stopped") == []


def test_a_run_that_ends_makes_what_is_pending_moot(veto_project: ProjectFixture) -> None:
    """Its stop is not sent any more; should a receiver see that the job is gone, that is taken."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    assert finish(veto_project, run) == DecisionState.MOOT
    assert load_stop_delivery_states(veto_project) == ["cancelled"]
    assert report(veto_project, decided(veto_project, run).id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED


def test_only_the_scheduler_ends_what_was_handed_out(project: ProjectFixture, veto_project: ProjectFixture) -> None:
    """A run that ends leaves its stop to a receiver's word where any could have been told of it, else it is moot."""
    alone = project.open_run()
    project.post_observations(alone, DECLINING_EVALS)
    assert finish(project, alone) == DecisionState.MOOT
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    commands.finish_run(veto_project.database, veto_project.id, run.id, "completed", ONE_HOUR_LATER)
    assert decided(veto_project, run).state == DecisionState.REQUESTED
    assert report(veto_project, decided(veto_project, run).id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED


def order(project: ProjectFixture, run: Run, now: datetime = ONE_HOUR_LATER) -> Decision:
    return commands.stop_run(project.database, project.id, run.id, StopOrdered(now, "dana", "the reward is broken"))


def test_a_person_stops_a_run_that_was_never_flagged(veto_project: ProjectFixture) -> None:
    """It is a decision of theirs: handed out at once, told to the trainer, confirmed like others."""
    run = veto_project.open_run(mode="shadow")
    assert not veto_project.post_observations(run, DECLINING_EVALS[:2]).decision
    decision = order(veto_project, run)
    assert (decision.state, decision.verdict.reason) == (DecisionState.REQUESTED, "dana: the reward is broken")
    with pytest.raises(Conflict, match="requested already"):
        order(veto_project, run)
    assert load_stop_delivery_states(veto_project) == ["waiting"]
    receipt = veto_project.post_observations(run, DECLINING_EVALS[2:])
    assert receipt.decision is not None, "the verdict that came later made no second decision"
    assert receipt.decision.id == decision.id
    assert receipt.decision.stops(ONE_HOUR_LATER)
    assert report(veto_project, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict, match="has ended"):
        order(veto_project, run)
    with veto_project.database.reading() as tx:
        case = cases.find_case(tx, run.id, 1)
    assert case is not None
    assert case.decision_id is None, "the policy is not held to what a person did"


def test_a_person_stops_what_was_not_carried_out(project: ProjectFixture) -> None:
    """A run whose stop was only recorded is stopped under the decision that it has; its trainer hears of it."""
    run = project.open_run(mode="shadow")
    shadow = project.post_observations(run, DECLINING_EVALS).decision
    assert shadow is not None
    assert shadow.state == DecisionState.SHADOW
    assert order(project, run).id == shadow.id
    receipt = project.post_observations(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.stops(ONE_HOUR_LATER)


def test_nobody_waits_for_the_grace_period_of_an_order(veto_project: ProjectFixture) -> None:
    """A pending stop goes out at once; what waited for the end of its veto window does not go out as well."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    assert order(veto_project, run, NOW).state == DecisionState.REQUESTED
    assert sorted(load_stop_delivery_states(veto_project)) == ["cancelled", "waiting"]


def test_a_person_stops_again_what_goes_on(project: ProjectFixture) -> None:
    """A run that goes on after its stop was undone is stopped in a new attempt, under a decision that no receiver has
    seen before; the policy may stop that attempt too."""
    run = project.open_run()
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    commands.apply_command(project.database, project.id, decision.id, Undone(ONE_HOUR_LATER, "dana", "no"))
    again = order(project, run)
    assert (again.attempt, again.state) == (2, DecisionState.REQUESTED)
    assert again.id != decision.id
    stops = [event for event in project.load_events(run, "run.stop_requested") if event["decision_id"] == again.id]
    assert len(stops) == 1
    receipt = project.post_observations(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.id == again.id


def test_nothing_is_ordered_while_the_project_is_paused(project: ProjectFixture) -> None:
    """While the project is paused no run is stopped, and none begins a new attempt for it."""
    run, other = project.open_run("one"), project.open_run("other")
    decision = project.post_observations(other, DECLINING_EVALS).decision
    assert decision is not None
    commands.apply_command(project.database, project.id, decision.id, Undone(ONE_HOUR_LATER, "dana", "no"))
    pause.pause_project(project.database, project.id, "dana", "", ONE_HOUR_LATER)
    for one in (run, other):
        with pytest.raises(Conflict, match="paused"):
            order(project, one)
