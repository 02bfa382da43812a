"""The lanes of a decision: one bar a state, on one time axis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

import pytest
from evalstop_service.domain.decision_lifecycle import NEXT_STATES, DecisionState
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.web.pages.run_page import LASTING, DecisionLanes, draw_lanes
from hypothesis import given
from hypothesis import strategies as st

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
WINDOW = timedelta(minutes=10)


def draw_decision(states: list[DecisionState], gaps: list[float], waited: float) -> DecisionLanes:
    """The lanes of a decision that entered these states after these gaps, drawn some seconds later."""
    at = [START + timedelta(seconds=sum(gaps[:place])) for place in range(len(states))]
    changes = [DecisionChange(place, state, "dana", "why", {}, at[place]) for place, state in enumerate(states)]
    decision = Decision(
        id=UUID(int=1),
        run_id=UUID(int=2),
        project_id=UUID(int=3),
        attempt=1,
        state=states[-1],
        step=280,
        verdict=Verdict(Call.STOP, 280, 230, "a person says so"),
        best_checkpoint=None,
        policy_id=UUID(int=4),
        due_at=START + WINDOW,
        created_at=START,
        run_name="ppo",
        policy_name="default",
        policy_version=1,
        observed_probability=0.0,
    )
    return draw_lanes(decision, changes, at[-1] + timedelta(seconds=waited))


@st.composite
def lifecycles(draw: st.DrawFn) -> list[DecisionState]:
    """A path through the decision's life cycle."""
    states = [draw(st.sampled_from(DecisionState))]
    for _ in range(draw(st.integers(0, 8))):
        following = sorted(NEXT_STATES[states[-1]])
        if following:
            states.append(draw(st.sampled_from(following)))
    return states


@given(lifecycles(), st.lists(st.floats(0, 1e6), min_size=40, max_size=40), st.floats(0, 1e6))
def test_lanes_are_adjacent_and_proportional(states: list[DecisionState], gaps: list[float], waited: float) -> None:
    """Each lane starts where the one before ends, is as long as its share of the time, and together they fill the
    axis."""
    lanes_drawing = draw_decision(states, gaps, waited)
    lanes = lanes_drawing.lanes
    assert len(lanes) == len(states)
    assert lanes[0].x == 0.0
    for lane, following in pairwise(lanes):
        assert lane.x + lane.width == pytest.approx(following.x, abs=0.02)
        assert lane.seconds is not None
        assert lane.width == pytest.approx(
            100 * lane.seconds / lanes_drawing.seconds if lanes_drawing.seconds else 0.0, abs=0.02
        )
    last = lanes[-1]
    assert (last.seconds, last.is_open) == (None, states[-1] in LASTING)
    if lanes_drawing.seconds:
        assert last.x + last.width == pytest.approx(100.0, abs=0.02)
        assert last.is_open or last.width == 0.0


def test_pending_stop_extends_to_the_end_of_its_veto_window() -> None:
    """The axis of a pending stop ends with its veto window; that of a stop on hold ends now."""
    for waited in (0.0, 60.0):
        pending = draw_decision([DecisionState.PENDING], [], waited)
        assert (pending.seconds, pending.lanes[0].until) == (WINDOW.total_seconds(), START + WINDOW)
    on_hold = draw_decision([DecisionState.ON_HOLD], [], 60.0)
    assert (on_hold.seconds, on_hold.lanes[0].until, on_hold.lanes[0].width) == (60.0, None, 100.0)
