"""Commands of people and reports of receivers on decisions."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from evalstop_service.decisions import commands, pause
from evalstop_service.domain.decision_commands import StopOrdered, Undone, Vetoed
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.run import RunDescription
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.ingest.open_run import Resume
from evalstop_service.store import tables
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ONE_HOUR_LATER,
    ProjectFixture,
    load_stop_delivery_states,
)


def test_veto_in_the_window_cancels_the_stop(veto_project: ProjectFixture) -> None:
    """A veto within the window keeps the stop from being requested; repeated, it changes nothing."""
    _, decision = veto_project.open_declining_run()
    assert decision.state == DecisionState.PENDING
    for _ in range(2):
        vetoed = veto_project.apply_command(decision, Vetoed(NOW, "dana", "broken eval"))
        assert vetoed == DecisionState.VETOED
    assert veto_project.end_windows(ONE_HOUR_LATER) == 0
    assert load_stop_delivery_states(veto_project) == []


def test_veto_is_heard_until_the_stop_is_handed_over(veto_project: ProjectFixture) -> None:
    """A requested stop that nobody was handed is vetoed, whatever the time; a claimed one is refused."""
    for vetoed in (True, False):
        _, decision = veto_project.open_declining_run()
        veto_project.end_windows(ONE_HOUR_LATER)
        if vetoed:
            veto_project.apply_command(decision, Vetoed(ONE_HOUR_LATER, "dana", ""))
            assert load_stop_delivery_states(veto_project) == ["cancelled"]
    assert veto_project.claim_stops(ONE_HOUR_LATER) == 1
    with pytest.raises(Conflict, match=r"was handed over to the endpoint at 127\.0\.0\.1"):
        veto_project.apply_command(decision, Vetoed(ONE_HOUR_LATER, "dana", ""))


def test_confirmed_report_stops_the_run_once(veto_project: ProjectFixture) -> None:
    """A confirmation ends the run with one event; repeated, it changes nothing; contradicted, it is refused."""
    run, decision = veto_project.open_declining_run()
    veto_project.end_windows(ONE_HOUR_LATER)
    assert veto_project.record_report(decision, DecisionState.FAILED) == DecisionState.FAILED
    assert veto_project.record_report(decision, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert veto_project.record_report(decision, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict):
        veto_project.record_report(decision, DecisionState.FAILED)
    assert veto_project.load_run(run).status == "stopped"
    assert len(veto_project.load_events(run, "run.stopped")) == 1
    states = [row["state"] for row in veto_project.load_rows(tables.decision_changes, run)]
    assert states == ["pending", "requested", "failed", "confirmed"]


UNDONE = Undone(ONE_HOUR_LATER, "dana", "the eval was broken")


def test_end_of_a_run_is_announced_once(project: ProjectFixture) -> None:
    """A run that its trainer ended sends `run.completed` or `run.failed` with its owner; one that obeyed,
    `run.stopped`."""
    event_types = {"completed": "run.completed", "failed": "run.failed"}
    for status, event_type in event_types.items():
        run = project.open_run(description=RunDescription(owner="dana@example.org", group="seeds"))
        for _ in range(2):
            project.finish_run(run, status)
        (event,) = [row for row in project.load_rows(tables.events, run) if row["type"] in event_types.values()]
        assert event["type"] == event_type
        event_run = json.loads(event["body"])["data"]["run"]
        assert (event_run["owner"], event_run["group"]) == ("dana@example.org", "seeds")
    run, decision = project.open_declining_run()
    project.finish_run(run, now=ONE_HOUR_LATER, obeyed=decision.id)
    assert {row["type"] for row in project.load_rows(tables.events, run)} & {*event_types.values(), "run.stopped"} == {
        "run.stopped"
    }


def test_obedient_trainer_stops_its_run(project: ProjectFixture) -> None:
    """A trainer that obeys the decision it saw stops its run; a receiver may confirm it afterwards."""
    run, decision = project.open_declining_run(labels={"gpus": "8"}, total_steps=1000)

    def finish_obeying(run: Run, obeyed: UUID) -> str:
        return project.finish_run(run, now=ONE_HOUR_LATER, obeyed=obeyed, actor="key trainers").status

    assert finish_obeying(run, decision.id) == "stopped"
    assert finish_obeying(run, decision.id) == "stopped"
    obeyed = project.load_decision(run)
    assert (obeyed.state, obeyed.deadline_at) == ("obeyed", None)
    assert obeyed.state_reason == "the trainer saw the stop and ended the run by itself"
    assert len(project.load_events(run, "run.stopped")) == 1
    (case,) = project.load_rows(tables.cases, run)
    assert (case["treatment"], case["gpu_hours_saved"] is None) == ("stopped", False)
    assert project.record_report(decision, DecisionState.ACKNOWLEDGED) == DecisionState.OBEYED
    assert project.record_report(decision, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    assert project.load_run(run).ended_at == ONE_HOUR_LATER
    assert len(project.load_events(run, "run.stopped")) == 1
    other, _ = project.open_declining_run()
    assert finish_obeying(other, decision.id) == "completed"
    assert project.load_decision(other).state == "moot"


def test_acknowledged_stop_can_still_fail(veto_project: ProjectFixture) -> None:
    """An acknowledgement extends the deadline once; afterwards the stop can still fail."""
    run, decision = veto_project.open_declining_run()
    veto_project.end_windows(ONE_HOUR_LATER)
    for seconds in (120.0, 86_400.0):
        state = veto_project.record_report(decision, DecisionState.ACKNOWLEDGED, expected_seconds=seconds)
        assert state == DecisionState.ACKNOWLEDGED
    assert veto_project.load_decision(run).deadline_at == ONE_HOUR_LATER + timedelta(seconds=120 + 900)
    assert veto_project.load_decision(run).stops
    assert veto_project.record_report(decision, DecisionState.FAILED) == DecisionState.FAILED
    assert veto_project.load_decision(run).deadline_at is None
    with pytest.raises(Conflict, match="failed; it cannot become acknowledged"):
        veto_project.record_report(decision, DecisionState.ACKNOWLEDGED)


def test_undone_stop_requests_a_resume(project: ProjectFixture) -> None:
    """After an undo the trainer may go on, and receivers are asked to resume the job."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    project.post_observations(run, DECLINING_EVALS)
    for _ in range(2):
        assert project.apply_command(project.load_decision(run), UNDONE) == DecisionState.UNDONE
    assert not project.load_decision(run).stops
    (event,) = project.load_events(run, "run.resume_requested")
    data = json.loads(event["body"])["data"]
    assert (data["decision"]["state"], data["best_checkpoint"]["uri"]) == ("undone", "file:///1")


def test_undo_cancels_waiting_deliveries(veto_project: ProjectFixture) -> None:
    """A stop that still waits for its endpoint is cancelled by an undo."""
    _, decision = veto_project.open_declining_run()
    with pytest.raises(Conflict, match="veto it instead"):
        veto_project.apply_command(decision, Undone(NOW, "dana", ""))
    veto_project.end_windows(ONE_HOUR_LATER)
    assert veto_project.apply_command(decision, UNDONE) == DecisionState.UNDONE
    assert load_stop_delivery_states(veto_project) == ["cancelled"]


def test_reports_after_an_undo_are_only_recorded(project: ProjectFixture) -> None:
    """Reports of a receiver that had started are recorded, once if sent again, and the run goes on."""
    run, decision = project.open_declining_run()
    early = Reported(ONE_HOUR_LATER, DecisionState.ACKNOWLEDGED, "receiver", "", {})
    commands.record_report(project.database, project.id, decision.id, early)
    project.apply_command(decision, UNDONE)
    for state in (DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED, DecisionState.CONFIRMED):
        assert project.record_report(decision, state) == DecisionState.UNDONE
    reasons = [row["reason"] for row in project.load_rows(tables.decision_changes, run)]
    assert [reason.partition(" was ")[0] for reason in reasons[-2:]] == ["acknowledged", "confirmed"]
    assert len(reasons) == 5
    assert project.load_run(run).status == "running"
    assert project.load_events(run, "run.stopped") == []


def test_ended_run_makes_a_pending_stop_moot(veto_project: ProjectFixture) -> None:
    """When the run ends its pending stop is not sent; a later confirmation is still accepted."""
    run, decision = veto_project.open_declining_run()
    veto_project.finish_run(run)
    assert veto_project.load_decision(run).state == DecisionState.MOOT
    assert (veto_project.end_windows(ONE_HOUR_LATER), load_stop_delivery_states(veto_project)) == (0, [])
    assert veto_project.record_report(decision, DecisionState.CONFIRMED) == DecisionState.CONFIRMED


def test_requested_stop_outlives_the_end_of_its_run(project: ProjectFixture, veto_project: ProjectFixture) -> None:
    """If a receiver may have the stop, it stays requested after the run ends; otherwise it is moot."""
    run_without_receiver, _ = project.open_declining_run()
    project.finish_run(run_without_receiver)
    assert project.load_decision(run_without_receiver).state == DecisionState.MOOT
    run, decision = veto_project.open_declining_run()
    veto_project.end_windows(ONE_HOUR_LATER)
    veto_project.finish_run(run, now=ONE_HOUR_LATER)
    assert veto_project.load_decision(run).state == DecisionState.REQUESTED
    assert veto_project.record_report(decision, DecisionState.CONFIRMED) == DecisionState.CONFIRMED


def test_report_on_an_earlier_attempt_changes_its_case(veto_project: ProjectFixture) -> None:
    """A stop that a receiver may have outlives its attempt; what is reported of it is counted for that attempt."""
    run, decision = veto_project.open_declining_run()
    veto_project.end_windows(ONE_HOUR_LATER)
    assert veto_project.claim_stops(ONE_HOUR_LATER) == 1
    veto_project.submit(run, Resumed(1), ONE_HOUR_LATER)
    assert veto_project.load_decision(run).state == DecisionState.REQUESTED
    veto_project.apply_command(decision, UNDONE)
    (case,) = veto_project.load_rows(tables.cases, run)
    assert (case["attempt"], case["treatment"]) == (1, "prevented")


def order_stop(project: ProjectFixture, run: Run, now: datetime = ONE_HOUR_LATER) -> Decision:
    return project.order_stop(run, StopOrdered(now, "dana", "the reward is broken"))


def test_person_can_stop_any_run(veto_project: ProjectFixture) -> None:
    """A person's stop is a decision, requested at once, reported to the trainer and confirmed like others."""
    run = veto_project.open_run(mode="shadow")
    assert not veto_project.post_observations(run, DECLINING_EVALS[:2]).decision
    decision = order_stop(veto_project, run)
    assert (decision.state, decision.verdict.reason) == (DecisionState.REQUESTED, "dana: the reward is broken")
    assert (decision.step, decision.verdict.step) == (1, 1), "the last step that the run has reported"
    with pytest.raises(Conflict, match="requested already"):
        order_stop(veto_project, run)
    assert load_stop_delivery_states(veto_project) == ["waiting"]
    receipt = veto_project.post_observations(run, DECLINING_EVALS[2:])
    assert receipt.decision is not None, "a later verdict makes no second decision"
    assert receipt.decision.id == decision.id
    assert receipt.decision.stops
    assert veto_project.record_report(decision, DecisionState.CONFIRMED) == DecisionState.CONFIRMED
    with pytest.raises(Conflict, match="has ended"):
        order_stop(veto_project, run)
    case = veto_project.load_case(run)
    assert case.decision_id is None, "a person's stop is not counted for the policy"


def test_person_can_stop_a_shadow_decision(project: ProjectFixture) -> None:
    """A run with a shadow decision is stopped under that decision, and its trainer sees it."""
    run, shadow = project.open_declining_run(mode="shadow")
    assert shadow.state == DecisionState.SHADOW
    assert order_stop(project, run).id == shadow.id
    receipt = project.post_observations(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.stops


def test_ordered_stop_skips_the_veto_window(veto_project: ProjectFixture) -> None:
    """A pending stop is requested at once, and not again at the end of its window."""
    run, _ = veto_project.open_declining_run()
    assert order_stop(veto_project, run, NOW).state == DecisionState.REQUESTED
    assert (veto_project.end_windows(ONE_HOUR_LATER), load_stop_delivery_states(veto_project)) == (0, ["waiting"])


def test_person_can_stop_a_run_again(project: ProjectFixture) -> None:
    """A run that goes on after an undone stop is stopped in a new attempt, under a new decision."""
    run, decision = project.open_declining_run()
    project.apply_command(decision, Undone(ONE_HOUR_LATER, "dana", "no"))
    again = order_stop(project, run)
    assert (again.attempt, again.state) == (2, DecisionState.REQUESTED)
    assert again.id != decision.id
    stops = [event for event in project.load_events(run, "run.stop_requested") if event["decision_id"] == again.id]
    assert len(stops) == 1
    receipt = project.post_observations(run, [PostedObservation("eval", 900, 0.1)])
    assert receipt.decision is not None
    assert receipt.decision.id == again.id


@pytest.mark.parametrize("ended", [False, True], ids=["failed", "moot"])
def test_person_can_stop_a_run_whose_stop_came_to_nothing(project: ProjectFixture, ended: bool) -> None:
    """A run that goes on after its stop failed, or after it had ended by itself, is stopped in a new attempt."""
    run, decision = project.open_declining_run("ppo-7b")
    if ended:
        project.finish_run(run)
        project.open_run("ppo-7b", resume=Resume.MUST)
    else:
        project.record_report(decision, DecisionState.FAILED)
    assert project.load_decision(run).state == (DecisionState.MOOT if ended else DecisionState.FAILED)
    again = order_stop(project, run)
    assert (again.attempt, again.state) == (2, DecisionState.REQUESTED)
    began = project.load_rows(tables.attempts, run)[-1]
    assert (began["attempt"], began["resumed_from_step"]) == (2, DECLINING_EVALS[-1].step)


def test_run_that_ends_within_the_veto_window_has_not_obeyed(veto_project: ProjectFixture) -> None:
    """Nobody was asked to stop it yet, whatever its trainer says."""
    run, decision = veto_project.open_declining_run()
    assert veto_project.finish_run(run, obeyed=decision.id).status == "completed"
    assert veto_project.load_decision(run).state == DecisionState.MOOT


def test_ordered_stop_is_refused_while_paused(project: ProjectFixture) -> None:
    """While the project is paused no run can be stopped, and none starts a new attempt for it."""
    run, (other, decision) = project.open_run("one"), project.open_declining_run("other")
    project.apply_command(decision, Undone(ONE_HOUR_LATER, "dana", "no"))
    pause.pause_project(project.database, project.id, "dana", "", ONE_HOUR_LATER)
    for each in (run, other):
        with pytest.raises(Conflict, match="paused"):
            order_stop(project, each)
    resumed = pause.resume_project(project.database, project.id, "dana", ONE_HOUR_LATER)
    assert (resumed.paused_at, resumed.paused_by, resumed.paused_reason) == (None, None, None)


def test_why_a_run_was_not_stopped_stays_known(project: ProjectFixture) -> None:
    """A run that ends while its stop is on hold, or after its stop failed, still says why it was not stopped."""
    failed, decision = project.open_declining_run("failed")
    project.record_report(decision, DecisionState.FAILED)
    project.finish_run(failed)
    ended = project.load_decision(failed)
    assert ended.state == DecisionState.FAILED
    assert ended.state_reason.endswith("; the run ended by itself: completed")
    with pytest.raises(Conflict, match="nothing to undo"):
        project.apply_command(ended, Undone(ONE_HOUR_LATER, "dana", "no"))
    pause.pause_project(project.database, project.id, "dana", "the grader is broken", NOW)
    held, _ = project.open_declining_run("held")
    project.finish_run(held)
    moot = project.load_decision(held)
    assert moot.state == DecisionState.MOOT
    assert "the project was paused by dana: the grader is broken" in moot.state_reason
