"""What people and receivers say of a decision."""

from __future__ import annotations

from uuid import UUID

import pytest
from evalstop_service import responses
from evalstop_service.errors import Conflict
from evalstop_service.lifecycle import State
from evalstop_service.store import leases, tables

from tests.service.scenes import (
    FALLING,
    LATER,
    NOW,
    Scene,
    deliveries_of_stops,
)


def test_veto_within_grace(graceful: Scene) -> None:
    """Within the grace period a person can say no, twice without harm; what waits to be sent is cancelled."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    assert decision.state == State.PENDING
    assert deliveries_of_stops(graceful) == ["waiting"]
    for _ in range(2):
        said = responses.veto(graceful.database, graceful.project_id, decision.id, "dana", "broken eval", NOW)
        assert said.state == State.VETOED
    assert deliveries_of_stops(graceful) == ["cancelled"]
    with graceful.database.transaction() as tx:
        bodies = [claimed.body for claimed in leases.claim(tx, LATER, 60.0, 10, 10)]
    assert not any("run.stop_requested" in body for body in bodies)


def test_no_veto_after_grace(graceful: Scene) -> None:
    """Once the grace period is over the stop can no longer be taken back."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    with pytest.raises(Conflict, match="grace period"):
        responses.veto(graceful.database, graceful.project_id, decision.id, "dana", "", LATER)
    assert deliveries_of_stops(graceful) == ["waiting"]


def report(scene: Scene, decision_id: UUID, state: State) -> State:
    said = responses.Report(state, "receiver", "as seen", {"exit_status": -15})
    return State(responses.report(scene.database, scene.project_id, decision_id, said, LATER).state)


def test_reports_follow_the_life_of_a_decision(graceful: Scene) -> None:
    """A receiver's report ends the run and is told once; repeated it changes nothing, contradicted it is refused."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    assert report(graceful, decision.id, State.FAILED) == State.FAILED
    assert report(graceful, decision.id, State.CONFIRMED) == State.CONFIRMED
    assert report(graceful, decision.id, State.CONFIRMED) == State.CONFIRMED
    with pytest.raises(Conflict):
        report(graceful, decision.id, State.FAILED)
    assert graceful.read(run).status == "stopped"
    assert len(graceful.events(run, "run.stopped")) == 1
    states = [row["state"] for row in graceful.rows(tables.decision_changes, run)]
    assert states == ["pending", "requested", "failed", "confirmed"]
