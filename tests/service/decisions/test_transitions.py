"""Stops on hold: put on hold at once or later, checked again, released."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest
from evalstop_service.clock import rfc3339
from evalstop_service.decisions import deadlines, transitions
from evalstop_service.domain.decision_commands import Released, Vetoed
from evalstop_service.domain.decision_events import GuardsRaised
from evalstop_service.domain.decision_lifecycle import DecisionState, Guard, GuardKind
from evalstop_service.errors import Conflict
from evalstop_service.store import decisions, hand_overs, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run

from tests.service.concurrency import run_concurrently
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, evals, load_stop_delivery_states

MINUTE = timedelta(minutes=1)
PAUSE = Guard(GuardKind.PAUSED, "the project was paused by dana")


def pause_project(project: ProjectFixture) -> None:
    project.change_settings(paused_at=NOW, paused_by="dana")


def resume_project(project: ProjectFixture) -> None:
    project.change_settings(paused_at=None, paused_by=None)


def open_run_on_hold(project: ProjectFixture) -> Run:
    """Open a run whose stop is on hold because its project is paused."""
    pause_project(project)
    run, _ = project.open_declining_run()
    assert project.load_decision(run).state == DecisionState.ON_HOLD
    return run


def load_announced_guards(project: ProjectFixture, run: Run) -> list[list[str]]:
    """Load the kinds of guards in each `run.stop_on_hold`."""
    bodies = [json.loads(row["body"]) for row in project.load_events(run, "run.stop_on_hold")]
    return [[guard["kind"] for guard in body["data"]["guards"]] for body in bodies]


def hold_stop(project: ProjectFixture, run: Run, now: datetime) -> Decision | None:
    with project.database.transaction() as tx:
        locked = runs.lock_run(tx, project.id, run.id)
        before = decisions.lock_decision(tx, run.id, project.load_decision(run).id)
        moved = transitions.move_decision(tx, locked, before, GuardsRaised(now, (PAUSE,)))
        return moved if moved != before else None


def test_guard_puts_a_stop_on_hold(veto_project: ProjectFixture) -> None:
    """A stop with a guard is not requested; an event and the history name the guard."""
    run = open_run_on_hold(veto_project)
    assert veto_project.load_events(run, "run.stop_requested") == []
    assert load_announced_guards(veto_project, run) == [[GuardKind.PAUSED]]
    (row,) = veto_project.load_rows(tables.decision_changes, run)
    assert row["details"]["guards"][0]["reason"] == "the project was paused by dana"
    assert not veto_project.load_decision(run).stops
    assert veto_project.load_decision(run).deadline_at == NOW + MINUTE


def test_stop_on_hold_is_checked_every_minute(veto_project: ProjectFixture) -> None:
    """An event is sent only when the guards change; without guards the veto window begins."""
    run = open_run_on_hold(veto_project)
    deadlines.process_overdue(veto_project.database, NOW + MINUTE)
    assert veto_project.load_decision(run).deadline_at == NOW + 2 * MINUTE
    veto_project.change_settings(stops_per_hour=0)
    deadlines.process_overdue(veto_project.database, NOW + 2 * MINUTE)
    assert load_announced_guards(veto_project, run) == [[GuardKind.PAUSED], [GuardKind.PAUSED, "stops_per_hour"]]
    veto_project.change_settings(paused_at=None, stops_per_hour=30)
    deadlines.process_overdue(veto_project.database, NOW + 3 * MINUTE)
    decision = veto_project.load_decision(run)
    assert (decision.state, decision.due_at, decision.deadline_at) == (DecisionState.PENDING, NOW + 4 * MINUTE, None)


def test_each_veto_window_is_announced_once(veto_project: ProjectFixture) -> None:
    """Each window that opens is announced at once, with what the stop saves, and not when it is only extended; the
    announcement of a window that closes is no longer sent."""
    chat = veto_project.add_endpoint(["run.stop_pending"], url="http://127.0.0.1:9/chat")
    run = veto_project.open_run(labels={"gpus": "8"}, total_steps=24)
    for step, value in enumerate((0.5, 0.9, 0.8, 0.7, 0.6)):
        veto_project.post_observations(run, evals(value, start=step), NOW + step * MINUTE)
    decision = veto_project.load_decision(run)
    (event,) = veto_project.load_events(run, "run.stop_pending")
    data = json.loads(event["body"])["data"]
    assert data["decision"]["due_at"] == rfc3339(decision.due_at)
    # 8 GPUs took a minute a step.
    assert data["gpu_hours_left"] == pytest.approx(8 / 60 * (24 - decision.step))
    with veto_project.database.transaction() as tx:
        assert hand_overs.extend_windows(tx, decision.due_at, 60.0, None, "nothing could be written") == 1
    assert hold_stop(veto_project, run, NOW + 5 * MINUTE) is not None
    (delivery,) = (row for row in veto_project.load_rows(tables.deliveries, run) if row["endpoint_id"] == chat.id)
    assert delivery["state"] == "cancelled"
    deadlines.process_overdue(veto_project.database, NOW + 7 * MINUTE)
    assert len(veto_project.load_events(run, "run.stop_pending")) == 2


def test_stop_without_a_veto_window_is_not_announced(project: ProjectFixture) -> None:
    """Without a veto window there is nothing to veto, and no `run.stop_pending`."""
    run, _ = project.open_declining_run()
    assert project.load_events(run, "run.stop_pending") == []


def test_new_eval_releases_a_stop_without_guards(project: ProjectFixture) -> None:
    """The receipt of an eval after the guard is gone already requests the stop."""
    run = open_run_on_hold(project)
    resume_project(project)
    receipt = project.post_observations(run, [*evals(0.5, start=5)], NOW + timedelta(seconds=5))
    assert receipt.decision is not None
    assert receipt.decision.stops
    assert project.load_decision(run).state == DecisionState.REQUESTED
    assert len(project.load_events(run, "run.stop_requested")) == 1


def test_stop_stays_on_hold_once_the_verdict_changed(project: ProjectFixture) -> None:
    """When a late eval changes the verdict, the stop stays on hold although no guard is left."""
    pause_project(project)
    run = project.open_run()
    project.post_observations(run, [*DECLINING_EVALS[:3], *DECLINING_EVALS[4:], *evals(0.5, start=5)])
    assert project.post_observations(run, evals(0.95, start=3)).run.verdict.verdict == "suspect"
    resume_project(project)
    deadlines.process_overdue(project.database, NOW + MINUTE)
    assert project.load_decision(run).state == DecisionState.ON_HOLD


def test_person_can_release_a_stop_on_hold(project: ProjectFixture) -> None:
    """A person can release a stop despite a limit, repeatedly without effect, but not during a pause."""
    run = open_run_on_hold(project)

    def release() -> DecisionState:
        return project.apply_command(project.load_decision(run), Released(NOW, "dana", "it is urgent"))

    with pytest.raises(Conflict, match="on hold and its project is paused"):
        release()
    project.change_settings(paused_at=None, stops_per_hour=0)
    assert [release(), release()] == [DecisionState.REQUESTED, DecisionState.REQUESTED]
    assert len(project.load_events(run, "run.stop_requested")) == 1
    assert [row["actor"] for row in project.load_rows(tables.decision_changes, run)][1:] == ["dana"]


def test_stop_on_hold_can_be_vetoed(project: ProjectFixture) -> None:
    """A vetoed stop on hold is not requested once its guard is gone."""
    run = open_run_on_hold(project)
    vetoed = project.apply_command(project.load_decision(run), Vetoed(NOW, "dana", "a known dip"))
    assert vetoed == DecisionState.VETOED
    resume_project(project)
    deadlines.process_overdue(project.database, NOW + MINUTE)
    assert project.load_events(run, "run.stop_requested") == []


def test_stop_on_hold_gets_a_new_window(veto_project: ProjectFixture) -> None:
    """A pending stop put on hold is not requested at the end of its window; released, it gets a new one."""
    run, _ = veto_project.open_declining_run()
    assert hold_stop(veto_project, run, NOW + MINUTE / 2) is not None
    assert hold_stop(veto_project, run, NOW + MINUTE / 2) is None, "it is already on hold"
    assert (veto_project.load_decision(run).state, veto_project.end_windows(NOW + MINUTE)) == (DecisionState.ON_HOLD, 0)
    assert load_announced_guards(veto_project, run) == [[GuardKind.PAUSED]]
    deadlines.process_overdue(veto_project.database, NOW + 2 * MINUTE)
    assert veto_project.load_decision(run).due_at == NOW + 3 * MINUTE
    assert veto_project.end_windows(NOW + 3 * MINUTE) == 1
    assert load_stop_delivery_states(veto_project) == ["waiting"]


def test_stop_that_was_handed_over_is_not_put_on_hold(veto_project: ProjectFixture) -> None:
    """A stop that went out at the end of its veto window stays so."""
    run, decision = veto_project.open_declining_run()
    veto_project.end_windows(NOW + MINUTE)
    with veto_project.database.transaction() as tx:
        assert hand_overs.try_hand_over(tx, run, decision, "slurm-a", NOW + MINUTE)
    assert hold_stop(veto_project, run, NOW + MINUTE) is None
    assert (veto_project.load_decision(run).state, load_stop_delivery_states(veto_project)) == (
        DecisionState.REQUESTED,
        ["waiting"],
    )


def test_hold_races_with_the_end_of_the_veto_window(database: Database, veto_project: ProjectFixture) -> None:
    """Whichever commits first, the stop is on hold, and its request, if it was sent, is canceled."""
    for attempt in range(5):
        veto_project.change_settings(stops_share=None, stops_per_hour=None)
        run, _ = veto_project.open_declining_run()

        def come_due() -> None:
            veto_project.end_windows(NOW + MINUTE)

        calls = (come_due, lambda run=run: hold_stop(veto_project, run, NOW + MINUTE / 2))
        assert run_concurrently(*(calls if attempt % 2 else reversed(calls))) == []
        assert veto_project.load_decision(run).state == DecisionState.ON_HOLD
        assert load_announced_guards(veto_project, run) == [[GuardKind.PAUSED]]
        assert load_stop_delivery_states(veto_project) == ["cancelled"] * len(load_stop_delivery_states(veto_project))
