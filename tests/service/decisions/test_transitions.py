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

from tests.service.scenes import FALLING, NOW, Scene, at_once, deliveries_of_stops, evals

MINUTE = timedelta(minutes=1)
PAUSE = Guard(GuardKind.PAUSED, "the project was paused by dana")


def settle(scene: Scene, **changes: Any) -> None:
    """Change the project's settings."""
    with scene.database.transaction() as tx:
        projects.update_project(tx, replace(projects.lock_project(tx, scene.project_id), **changes))


def pause(scene: Scene) -> None:
    settle(scene, paused_at=NOW, paused_by="dana")


def resume(scene: Scene) -> None:
    settle(scene, paused_at=None, paused_by=None)


def decided(scene: Scene, run: Run) -> Decision:
    found = scene.decision(run)
    assert found is not None
    return found


def on_hold(scene: Scene) -> Run:
    """A run whose stop is on_hold because its project is paused."""
    pause(scene)
    run = scene.open()
    scene.post(run, FALLING)
    assert decided(scene, run).state == DecisionState.ON_HOLD
    return run


def guards_told(scene: Scene, run: Run) -> list[list[str]]:
    """The kinds of guards that each `run.stop_on_hold` tells of."""
    bodies = [json.loads(row["body"]) for row in scene.events(run, "run.stop_on_hold")]
    return [[guard["kind"] for guard in body["data"]["guards"]] for body in bodies]


def hold(scene: Scene, run: Run, now: datetime) -> Decision | None:
    with scene.database.transaction() as tx:
        locked = runs.lock_run(tx, scene.project_id, run.id)
        assert locked is not None
        return transitions.hold_stop(tx, locked, [PAUSE], now)


def test_a_guard_withholds(graceful: Scene) -> None:
    """A stop that something speaks against is not handed out; an event says what it is, and so does the history."""
    run = on_hold(graceful)
    assert graceful.events(run, "run.stop_requested") == []
    assert guards_told(graceful, run) == [[GuardKind.PAUSED]]
    (row,) = graceful.rows(tables.decision_changes, run)
    assert row["details"]["guards"][0]["reason"] == "the project was paused by dana"
    assert not decided(graceful, run).stops(NOW + 600 * MINUTE)
    assert decided(graceful, run).deadline_at == NOW + MINUTE


def test_it_is_looked_at_again_every_minute(graceful: Scene) -> None:
    """Nothing is told again as long as the same speaks against it; when nothing does, its veto window begins."""
    run = on_hold(graceful)
    deadlines.process_overdue(graceful.database, NOW + MINUTE)
    assert decided(graceful, run).deadline_at == NOW + 2 * MINUTE
    settle(graceful, stops_per_hour=0)
    deadlines.process_overdue(graceful.database, NOW + 2 * MINUTE)
    assert guards_told(graceful, run) == [[GuardKind.PAUSED], [GuardKind.PAUSED, "stops_per_hour"]]
    settle(graceful, paused_at=None, stops_per_hour=30)
    deadlines.process_overdue(graceful.database, NOW + 3 * MINUTE)
    decision = decided(graceful, run)
    assert (decision.state, decision.due_at, decision.deadline_at) == (DecisionState.PENDING, NOW + 4 * MINUTE, None)
    assert deliveries_of_stops(graceful) == ["waiting"]


def test_an_eval_looks_again_at_once(scene: Scene) -> None:
    """The answer to the post with which the way is free says that the run is to stop."""
    run = on_hold(scene)
    resume(scene)
    receipt = scene.post(run, [*evals(0.5, start=5)], NOW + timedelta(seconds=5))
    assert receipt.decision is not None
    assert receipt.decision.stops(NOW + timedelta(seconds=5))
    assert decided(scene, run).state == DecisionState.REQUESTED
    assert len(scene.events(run, "run.stop_requested")) == 1


def test_what_the_verdict_no_longer_wants_stays_on_hold(scene: Scene) -> None:
    """A late eval takes the verdict back: nothing is handed out then, though nothing speaks against it any more."""
    pause(scene)
    run = scene.open()
    scene.post(run, [*FALLING[:3], *FALLING[4:], *evals(0.5, start=5)])
    assert scene.post(run, evals(0.95, start=3)).run.verdict.verdict == "suspect"
    resume(scene)
    deadlines.process_overdue(scene.database, NOW + MINUTE)
    assert decided(scene, run).state == DecisionState.ON_HOLD


def test_a_person_releases_it(scene: Scene) -> None:
    """Despite a bound, twice without harm; not despite a pause."""
    run = on_hold(scene)

    def release() -> str:
        decision = decided(scene, run)
        return commands.apply_command(
            scene.database, scene.project_id, decision.id, Released(NOW, "dana", "it is urgent")
        ).state

    with pytest.raises(Conflict, match="on hold and its project is paused"):
        release()
    settle(scene, paused_at=None, stops_per_hour=0)
    assert [release(), release()] == [DecisionState.REQUESTED, DecisionState.REQUESTED]
    assert len(scene.events(run, "run.stop_requested")) == 1
    assert [row["actor"] for row in scene.rows(tables.decision_changes, run)][1:] == ["dana"]


def test_a_person_vetoes_it(scene: Scene) -> None:
    """What is on_hold can be vetoed, and is not handed out when the way is free."""
    run = on_hold(scene)
    said = commands.apply_command(
        scene.database, scene.project_id, decided(scene, run).id, Vetoed(NOW, "dana", "a known dip")
    )
    assert said.state == DecisionState.VETOED
    resume(scene)
    deadlines.process_overdue(scene.database, NOW + MINUTE)
    assert scene.events(run, "run.stop_requested") == []


def test_what_comes_up_in_the_grace_period_holds(graceful: Scene) -> None:
    """A pending stop is on hold, its deliveries are cancelled; released, it is announced anew with its grace."""
    run = graceful.open()
    graceful.post(run, FALLING)
    assert hold(graceful, run, NOW + MINUTE / 2) is not None
    assert hold(graceful, run, NOW + MINUTE / 2) is None, "it is on hold already"
    assert (decided(graceful, run).state, deliveries_of_stops(graceful)) == (DecisionState.ON_HOLD, ["cancelled"])
    assert guards_told(graceful, run) == [[GuardKind.PAUSED]]
    deadlines.process_overdue(graceful.database, NOW + 2 * MINUTE)
    assert decided(graceful, run).due_at == NOW + 3 * MINUTE
    assert sorted(deliveries_of_stops(graceful)) == ["cancelled", "waiting"]


def test_what_is_handed_out_is_not_called_back(graceful: Scene) -> None:
    """Once its veto window is over a stop is requested, whether or not anybody has noticed, and is not held."""
    run = graceful.open()
    graceful.post(run, FALLING)
    assert hold(graceful, run, NOW + MINUTE) is None
    assert (decided(graceful, run).state, deliveries_of_stops(graceful)) == (DecisionState.REQUESTED, ["waiting"])


def test_a_pause_holds_all_that_is_pending(graceful: Scene) -> None:
    """Every pending stop of the project is on hold, and no other."""
    pending = [graceful.open() for _ in range(3)]
    for run in pending:
        settle(graceful, stops_share=None)
        graceful.post(run, FALLING)
    over = pending.pop()
    commands.apply_command(graceful.database, graceful.project_id, decided(graceful, over).id, Vetoed(NOW, "dana", ""))
    assert transitions.hold_pending_stops(graceful.database, graceful.project_id, [PAUSE], NOW) == 2
    assert [decided(graceful, run).state for run in pending] == [DecisionState.ON_HOLD] * 2
    assert decided(graceful, over).state == DecisionState.VETOED


def test_a_hold_and_the_end_of_the_grace_period_meet(database: Database, graceful: Scene) -> None:
    """Whichever comes first holds: a stop that was held is not sent, one that was requested is not on_hold."""
    for turn in range(5):
        settle(graceful, stops_share=None, stops_per_hour=None)
        run = graceful.open()
        graceful.post(run, FALLING)

        def come_due() -> None:
            with database.transaction() as tx:
                decisions.request_due_decisions(tx, NOW + MINUTE)

        calls = (come_due, lambda run=run: hold(graceful, run, NOW + MINUTE / 2))
        assert at_once(*(calls if turn % 2 else reversed(calls))) == []
        (stop,) = graceful.events(run, "run.stop_requested")
        sent = [row["state"] for row in graceful.rows(tables.deliveries, run) if row["event_id"] == stop["id"]]
        ends = {
            DecisionState.REQUESTED: (["waiting"], []),
            DecisionState.ON_HOLD: (["cancelled"], [[GuardKind.PAUSED]]),
        }
        assert (sent, guards_told(graceful, run)) == ends[DecisionState(decided(graceful, run).state)]
