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

from tests.service.scenes import (
    FALLING,
    LATER,
    NOW,
    Scene,
    deliveries_of_stops,
)


def test_veto_within_grace(graceful: Scene) -> None:
    """Within the veto window a person can say no, twice without harm; what waits to be sent is cancelled."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    assert decision.state == DecisionState.PENDING
    assert deliveries_of_stops(graceful) == ["waiting"]
    for _ in range(2):
        said = commands.apply_command(
            graceful.database, graceful.project_id, decision.id, Vetoed(NOW, "dana", "broken eval")
        )
        assert said.state == DecisionState.VETOED
    assert deliveries_of_stops(graceful) == ["cancelled"]
    with graceful.database.transaction() as tx:
        bodies = [claimed.body for claimed in leases.claim_deliveries(tx, LATER, 60.0, 10, 10)]
    assert not any("run.stop_requested" in body for body in bodies)


def test_no_veto_after_grace(graceful: Scene) -> None:
    """Once the veto window is over the stop can no longer be taken back."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    with pytest.raises(Conflict, match="veto window"):
        commands.apply_command(graceful.database, graceful.project_id, decision.id, Vetoed(LATER, "dana", ""))
    assert deliveries_of_stops(graceful) == ["waiting"]


def report(scene: Scene, decision_id: UUID, state: DecisionState) -> DecisionState:
    said = Reported(LATER, state, "receiver", "as seen", {"exit_status": -15})
    return DecisionState(commands.record_report(scene.database, scene.project_id, decision_id, said).state)


def test_reports_follow_the_life_of_a_decision(graceful: Scene) -> None:
    """A receiver's report ends the run and is told once; repeated it changes nothing, contradicted it is refused."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    assert report(graceful, decision.id, DecisionState.FAILED) == DecisionState.FAILED
    assert report(graceful, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert report(graceful, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict):
        report(graceful, decision.id, DecisionState.FAILED)
    assert graceful.read(run).status == "stopped"
    assert len(graceful.events(run, "run.stopped")) == 1
    states = [row["state"] for row in graceful.rows(tables.decision_changes, run)]
    assert states == ["pending", "requested", "failed", "confirmed"]


def decided(scene: Scene, run: Run) -> Decision:
    found = scene.decision(run)
    assert found is not None
    return found


def undo(scene: Scene, run: Run) -> str:
    decision = decided(scene, run)
    return commands.apply_command(
        scene.database, scene.project_id, decision.id, Undone(LATER, "dana", "the eval was broken")
    ).state


def finish(scene: Scene, run: Run) -> str:
    commands.finish_run(scene.database, scene.project_id, run.id, "completed", NOW)
    return decided(scene, run).state


def test_the_end_of_a_run_is_announced_once(scene: Scene) -> None:
    """A run that its trainer ended is announced as completed or failed, with its owner; one that obeyed is stopped."""
    ends = {"completed": "run.completed", "failed": "run.failed"}
    for status, event_type in ends.items():
        run = scene.open(description=RunDescription(owner="dana@example.org", group="seeds"))
        for _ in range(2):
            commands.finish_run(scene.database, scene.project_id, run.id, status, NOW)
        (event,) = [row for row in scene.rows(tables.events, run) if row["type"] in ends.values()]
        assert event["type"] == event_type
        told = json.loads(event["body"])["data"]["run"]
        assert (told["owner"], told["group"]) == ("dana@example.org", "seeds")
    run = scene.open()
    decision = scene.post(run, FALLING).decision
    assert decision is not None
    commands.finish_run(scene.database, scene.project_id, run.id, "completed", LATER, obeyed=decision.id)
    assert {row["type"] for row in scene.rows(tables.events, run)} & {*ends.values(), "run.stopped"} == {"run.stopped"}


def test_a_trainer_that_obeys_stops_its_run(scene: Scene) -> None:
    """The decision that the trainer saw is obeyed and the run stopped, which a receiver may confirm afterwards."""
    run = scene.open(labels={"gpus": "8"}, total_steps=1000)
    scene.post(run, FALLING)
    decision = decided(scene, run)

    def finish_obeying(run: Run, obeyed: UUID) -> str:
        return commands.finish_run(
            scene.database, scene.project_id, run.id, "completed", LATER, obeyed=obeyed, actor="key trainers"
        ).status

    assert finish_obeying(run, decision.id) == "stopped"
    assert finish_obeying(run, decision.id) == "stopped"
    obeyed = decided(scene, run)
    assert (obeyed.state, obeyed.deadline_at) == ("obeyed", None)
    assert obeyed.state_reason == "the trainer saw the stop and ended the run by itself"
    assert len(scene.events(run, "run.stopped")) == 1
    (case,) = scene.rows(tables.cases, run)
    assert (case["treatment"], case["gpu_hours_saved"] is None) == ("stopped", False)
    assert report(scene, decision.id, DecisionState.ACKNOWLEDGED) == DecisionState.OBEYED
    assert report(scene, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert scene.read(run).ended_at == LATER
    assert len(scene.events(run, "run.stopped")) == 1
    other = scene.open()
    scene.post(other, FALLING)
    assert finish_obeying(other, decision.id) == "completed"
    assert decided(scene, other).state == "moot"


def test_a_stop_that_is_under_way_is_acknowledged(graceful: Scene) -> None:
    """A receiver that has begun says so and for how long; said again it changes nothing, and it may still fail."""
    run = graceful.open()
    graceful.post(run, FALLING)
    decision = decided(graceful, run)
    for seconds in (120.0, 86_400.0):
        said = Reported(LATER, DecisionState.ACKNOWLEDGED, "receiver", "found", {"job": "4711"}, seconds)
        said_state = commands.record_report(graceful.database, graceful.project_id, decision.id, said).state
        assert said_state == DecisionState.ACKNOWLEDGED
    assert decided(graceful, run).deadline_at == LATER + timedelta(seconds=120 + 900)
    assert decided(graceful, run).stops(LATER)
    assert report(graceful, decision.id, DecisionState.FAILED) == DecisionState.FAILED
    assert decided(graceful, run).deadline_at is None
    with pytest.raises(Conflict, match="failed; it cannot become acknowledged"):
        report(graceful, decision.id, DecisionState.ACKNOWLEDGED)


def test_what_was_handed_out_is_undone(scene: Scene) -> None:
    """The trainer may go on, receivers are asked to release the job, and what was not sent yet is not sent."""
    run = scene.open()
    scene.take(run, CheckpointSaved(1, "file:///1"))
    scene.post(run, FALLING)
    for _ in range(2):
        assert undo(scene, run) == DecisionState.UNDONE
    assert not decided(scene, run).stops(LATER)
    (event,) = scene.events(run, "run.resume_requested")
    data = json.loads(event["body"])["data"]
    assert (data["decision"]["state"], data["best_checkpoint"]["uri"]) == ("undone", "file:///1")


def test_undone_it_is_not_sent(graceful: Scene) -> None:
    """A stop that waits for an endpoint that is away is cancelled."""
    run = graceful.open()
    graceful.post(run, FALLING)
    with pytest.raises(Conflict, match="veto it instead"):
        commands.apply_command(
            graceful.database, graceful.project_id, decided(graceful, run).id, Undone(NOW, "dana", "")
        )
    assert undo(graceful, run) == DecisionState.UNDONE
    assert deliveries_of_stops(graceful) == ["cancelled"]


def test_reports_after_an_undo_are_kept_and_change_nothing(scene: Scene) -> None:
    """The receiver that had begun is not told off; what it says is on record once, and the run goes on."""
    run = scene.open()
    scene.post(run, FALLING)
    undo(scene, run)
    for state in (DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED, DecisionState.CONFIRMED):
        assert report(scene, decided(scene, run).id, state) == DecisionState.UNDONE
    rows = [row["details"].get("reported") for row in scene.rows(tables.decision_changes, run)]
    assert rows == [None, None, "acknowledged", "confirmed"]
    assert scene.read(run).status == "running"
    assert scene.events(run, "run.stopped") == []


def test_a_run_that_ends_makes_what_is_pending_moot(graceful: Scene) -> None:
    """Its stop is not sent any more; should a receiver see that the job is gone, that is taken."""
    run = graceful.open()
    graceful.post(run, FALLING)
    assert finish(graceful, run) == DecisionState.MOOT
    assert deliveries_of_stops(graceful) == ["cancelled"]
    assert report(graceful, decided(graceful, run).id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED


def test_only_the_scheduler_ends_what_was_handed_out(scene: Scene, graceful: Scene) -> None:
    """A run that ends leaves its stop to a receiver's word where any could have been told of it, else it is moot."""
    alone = scene.open()
    scene.post(alone, FALLING)
    assert finish(scene, alone) == DecisionState.MOOT
    run = graceful.open()
    graceful.post(run, FALLING)
    commands.finish_run(graceful.database, graceful.project_id, run.id, "completed", LATER)
    assert decided(graceful, run).state == DecisionState.REQUESTED
    assert report(graceful, decided(graceful, run).id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED


def order(scene: Scene, run: Run, now: datetime = LATER) -> Decision:
    return commands.stop_run(scene.database, scene.project_id, run.id, StopOrdered(now, "dana", "the reward is broken"))


def test_a_person_stops_a_run_that_was_never_flagged(graceful: Scene) -> None:
    """It is a decision of theirs: handed out at once, told to the trainer, confirmed like others."""
    run = graceful.open(mode="shadow")
    assert not graceful.post(run, FALLING[:2]).decision
    decision = order(graceful, run)
    assert (decision.state, decision.verdict.reason) == (DecisionState.REQUESTED, "dana: the reward is broken")
    with pytest.raises(Conflict, match="requested already"):
        order(graceful, run)
    assert deliveries_of_stops(graceful) == ["waiting"]
    receipt = graceful.post(run, FALLING[2:])
    assert receipt.decision is not None, "the verdict that came later made no second decision"
    assert receipt.decision.id == decision.id
    assert receipt.decision.stops(LATER)
    assert report(graceful, decision.id, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict, match="has ended"):
        order(graceful, run)
    with graceful.database.reading() as tx:
        case = cases.find_case(tx, run.id, 1)
    assert case is not None
    assert case.decision_id is None, "the policy is not held to what a person did"


def test_a_person_stops_what_was_not_carried_out(scene: Scene) -> None:
    """A run whose stop was only recorded is stopped under the decision that it has; its trainer hears of it."""
    run = scene.open(mode="shadow")
    shadow = scene.post(run, FALLING).decision
    assert shadow is not None
    assert shadow.state == DecisionState.SHADOW
    assert order(scene, run).id == shadow.id
    receipt = scene.post(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.stops(LATER)


def test_nobody_waits_for_the_grace_period_of_an_order(graceful: Scene) -> None:
    """A pending stop goes out at once; what waited for the end of its veto window does not go out as well."""
    run = graceful.open()
    graceful.post(run, FALLING)
    assert order(graceful, run, NOW).state == DecisionState.REQUESTED
    assert sorted(deliveries_of_stops(graceful)) == ["cancelled", "waiting"]


def test_a_person_stops_again_what_goes_on(scene: Scene) -> None:
    """A run that goes on after its stop was undone is stopped in a new attempt, under a decision that no receiver has
    seen before; the policy may stop that attempt too."""
    run = scene.open()
    decision = scene.post(run, FALLING).decision
    assert decision is not None
    commands.apply_command(scene.database, scene.project_id, decision.id, Undone(LATER, "dana", "no"))
    again = order(scene, run)
    assert (again.attempt, again.state) == (2, DecisionState.REQUESTED)
    assert again.id != decision.id
    stops = [event for event in scene.events(run, "run.stop_requested") if event["decision_id"] == again.id]
    assert len(stops) == 1
    receipt = scene.post(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.id == again.id


def test_nothing_is_ordered_while_the_project_is_paused(scene: Scene) -> None:
    """While the project is paused no run is stopped, and none begins a new attempt for it."""
    run, other = scene.open("one"), scene.open("other")
    decision = scene.post(other, FALLING).decision
    assert decision is not None
    commands.apply_command(scene.database, scene.project_id, decision.id, Undone(LATER, "dana", "no"))
    pause.pause_project(scene.database, scene.project_id, "dana", "", LATER)
    for one in (run, other):
        with pytest.raises(Conflict, match="paused"):
            order(scene, one)
