"""Stops that are on hold: born so or held back later, looked at again, released."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from evalstop_service.decisions import commands, deadlines, transitions
from evalstop_service.errors import Conflict
from evalstop_service.rules.decision_lifecycle import DecisionState, Guard, GuardKind, Released, Vetoed
from evalstop_service.store import decisions, projects, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run

from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ProjectFixture,
    evals,
    load_stop_delivery_states,
    run_concurrently,
)

MINUTE = timedelta(minutes=1)
PAUSE = Guard(GuardKind.PAUSED, "the project was paused by dana")


def settle(project: ProjectFixture, **changes: Any) -> None:
    """Change the project's settings."""
    with project.database.transaction() as tx:
        projects.update_project(tx, replace(projects.lock_project(tx, project.id), **changes))


def pause(project: ProjectFixture) -> None:
    settle(project, paused_at=NOW, paused_by="dana")


def resume(project: ProjectFixture) -> None:
    settle(project, paused_at=None, paused_by=None)


def decided(project: ProjectFixture, run: Run) -> Decision:
    found = project.find_decision(run)
    assert found is not None
    return found


def on_hold(project: ProjectFixture) -> Run:
    """A run whose stop is on_hold because its project is paused."""
    pause(project)
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS)
    assert decided(project, run).state == DecisionState.ON_HOLD
    return run


def guards_told(project: ProjectFixture, run: Run) -> list[list[str]]:
    """The kinds of guards that each `run.stop_on_hold` tells of."""
    bodies = [json.loads(row["body"]) for row in project.load_events(run, "run.stop_on_hold")]
    return [[guard["kind"] for guard in body["data"]["guards"]] for body in bodies]


def hold(project: ProjectFixture, run: Run, now: datetime) -> Decision | None:
    with project.database.transaction() as tx:
        locked = runs.lock_run(tx, project.id, run.id)
        assert locked is not None
        return transitions.hold_stop(tx, locked, [PAUSE], now)


def test_a_guard_withholds(veto_project: ProjectFixture) -> None:
    """A stop that something speaks against is not handed out; an event says what it is, and so does the history."""
    run = on_hold(veto_project)
    assert veto_project.load_events(run, "run.stop_requested") == []
    assert guards_told(veto_project, run) == [[GuardKind.PAUSED]]
    (row,) = veto_project.load_rows(tables.decision_changes, run)
    assert row["details"]["guards"][0]["reason"] == "the project was paused by dana"
    assert not decided(veto_project, run).stops(NOW + 600 * MINUTE)
    assert decided(veto_project, run).deadline_at == NOW + MINUTE


def test_it_is_looked_at_again_every_minute(veto_project: ProjectFixture) -> None:
    """Nothing is told again as long as the same speaks against it; when nothing does, its veto window begins."""
    run = on_hold(veto_project)
    deadlines.process_overdue(veto_project.database, NOW + MINUTE)
    assert decided(veto_project, run).deadline_at == NOW + 2 * MINUTE
    settle(veto_project, stops_per_hour=0)
    deadlines.process_overdue(veto_project.database, NOW + 2 * MINUTE)
    assert guards_told(veto_project, run) == [[GuardKind.PAUSED], [GuardKind.PAUSED, "stops_per_hour"]]
    settle(veto_project, paused_at=None, stops_per_hour=30)
    deadlines.process_overdue(veto_project.database, NOW + 3 * MINUTE)
    decision = decided(veto_project, run)
    assert (decision.state, decision.due_at, decision.deadline_at) == (DecisionState.PENDING, NOW + 4 * MINUTE, None)
    assert load_stop_delivery_states(veto_project) == ["waiting"]


def test_an_eval_looks_again_at_once(project: ProjectFixture) -> None:
    """The answer to the post with which the way is free says that the run is to stop."""
    run = on_hold(project)
    resume(project)
    receipt = project.post_observations(run, [*evals(0.5, start=5)], NOW + timedelta(seconds=5))
    assert receipt.decision is not None
    assert receipt.decision.stops(NOW + timedelta(seconds=5))
    assert decided(project, run).state == DecisionState.REQUESTED
    assert len(project.load_events(run, "run.stop_requested")) == 1


def test_what_the_verdict_no_longer_wants_stays_on_hold(project: ProjectFixture) -> None:
    """A late eval takes the verdict back: nothing is handed out then, though nothing speaks against it any more."""
    pause(project)
    run = project.open_run()
    project.post_observations(run, [*DECLINING_EVALS[:3], *DECLINING_EVALS[4:], *evals(0.5, start=5)])
    assert project.post_observations(run, evals(0.95, start=3)).run.verdict.verdict == "suspect"
    resume(project)
    deadlines.process_overdue(project.database, NOW + MINUTE)
    assert decided(project, run).state == DecisionState.ON_HOLD


def test_a_person_releases_it(project: ProjectFixture) -> None:
    """Despite a bound, twice without harm; not despite a pause."""
    run = on_hold(project)

    def release() -> str:
        decision = decided(project, run)
        return commands.apply_command(
            project.database, project.id, decision.id, Released(NOW, "dana", "it is urgent")
        ).state

    with pytest.raises(Conflict, match="on hold and its project is paused"):
        release()
    settle(project, paused_at=None, stops_per_hour=0)
    assert [release(), release()] == [DecisionState.REQUESTED, DecisionState.REQUESTED]
    assert len(project.load_events(run, "run.stop_requested")) == 1
    assert [row["actor"] for row in project.load_rows(tables.decision_changes, run)][1:] == ["dana"]


def test_a_person_vetoes_it(project: ProjectFixture) -> None:
    """What is on_hold can be vetoed, and is not handed out when the way is free."""
    run = on_hold(project)
    said = commands.apply_command(
        project.database, project.id, decided(project, run).id, Vetoed(NOW, "dana", "a known dip")
    )
    assert said.state == DecisionState.VETOED
    resume(project)
    deadlines.process_overdue(project.database, NOW + MINUTE)
    assert project.load_events(run, "run.stop_requested") == []


def test_what_comes_up_in_the_grace_period_holds(veto_project: ProjectFixture) -> None:
    """A pending stop is on hold, its deliveries are cancelled; released, it is announced anew with its grace."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    assert hold(veto_project, run, NOW + MINUTE / 2) is not None
    assert hold(veto_project, run, NOW + MINUTE / 2) is None, "it is on hold already"
    assert (decided(veto_project, run).state, load_stop_delivery_states(veto_project)) == (
        DecisionState.ON_HOLD,
        ["cancelled"],
    )
    assert guards_told(veto_project, run) == [[GuardKind.PAUSED]]
    deadlines.process_overdue(veto_project.database, NOW + 2 * MINUTE)
    assert decided(veto_project, run).due_at == NOW + 3 * MINUTE
    assert sorted(load_stop_delivery_states(veto_project)) == ["cancelled", "waiting"]


def test_what_is_handed_out_is_not_called_back(veto_project: ProjectFixture) -> None:
    """Once its veto window is over a stop is requested, whether or not anybody has noticed, and is not held."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    assert hold(veto_project, run, NOW + MINUTE) is None
    assert (decided(veto_project, run).state, load_stop_delivery_states(veto_project)) == (
        DecisionState.REQUESTED,
        ["waiting"],
    )


def test_a_pause_holds_all_that_is_pending(veto_project: ProjectFixture) -> None:
    """Every pending stop of the project is on hold, and no other."""
    pending = [veto_project.open_run() for _ in range(3)]
    for run in pending:
        settle(veto_project, stops_share=None)
        veto_project.post_observations(run, DECLINING_EVALS)
    over = pending.pop()
    commands.apply_command(
        veto_project.database, veto_project.id, decided(veto_project, over).id, Vetoed(NOW, "dana", "")
    )
    assert transitions.hold_pending_stops(veto_project.database, veto_project.id, [PAUSE], NOW) == 2
    assert [decided(veto_project, run).state for run in pending] == [DecisionState.ON_HOLD] * 2
    assert decided(veto_project, over).state == DecisionState.VETOED


def test_a_hold_and_the_end_of_the_grace_period_meet(database: Database, veto_project: ProjectFixture) -> None:
    """Whichever comes first holds: a stop that was held is not sent, one that was requested is not on_hold."""
    for turn in range(5):
        settle(veto_project, stops_share=None, stops_per_hour=None)
        run = veto_project.open_run()
        veto_project.post_observations(run, DECLINING_EVALS)

        def come_due() -> None:
            with database.transaction() as tx:
                decisions.request_due_decisions(tx, NOW + MINUTE)

        calls = (come_due, lambda run=run: hold(veto_project, run, NOW + MINUTE / 2))
        assert run_concurrently(*(calls if turn % 2 else reversed(calls))) == []
        (stop,) = veto_project.load_events(run, "run.stop_requested")
        sent = [row["state"] for row in veto_project.load_rows(tables.deliveries, run) if row["event_id"] == stop["id"]]
        ends = {
            DecisionState.REQUESTED: (["waiting"], []),
            DecisionState.ON_HOLD: (["cancelled"], [[GuardKind.PAUSED]]),
        }
        assert (sent, guards_told(veto_project, run)) == ends[DecisionState(decided(veto_project, run).state)]
