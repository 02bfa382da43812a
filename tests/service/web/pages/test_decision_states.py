"""The states of a decision on the page of its run: how long each lasted, and when the last one ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.web.pages.run_page import list_states

from tests.service.web.pages.recorded_runs import Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY


@pytest.fixture
def decision(tenant: Tenant) -> Decision:
    return tenant.open_stopped_run("run", load_recorded_evals("np-0044")[:29])[1]


@SQLITE_ONLY
def test_each_state_lasts_until_the_next(decision: Decision) -> None:
    """A state lasts until the next begins; a last one that waits for a person has no end, a veto window has."""
    at = decision.created_at
    seconds = {DecisionState.PENDING: 0, DecisionState.ON_HOLD: 30, DecisionState.REQUESTED: 90}
    changes = [
        DecisionChange(place, state, "dana", "why", {}, at + timedelta(seconds=later))
        for place, (state, later) in enumerate(seconds.items())
    ]
    assert [(state.name, state.seconds) for state in list_states(decision, changes)] == [
        *(("veto window", 30.0), ("stop on hold", 60.0), ("stop requested", None)),
    ]
    deadline = replace(decision, deadline_at=at + timedelta(hours=1))
    ends = [list_states(deadline, changes[: place + 1])[-1].until for place in range(3)]
    assert ends == [decision.due_at, None, deadline.deadline_at]
