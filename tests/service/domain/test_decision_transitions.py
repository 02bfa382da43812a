"""Single transitions of decisions: deadlines, escalations, reports, and events that are refused."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from evalstop_service.domain.decision_commands import Released, StopOrdered, Undone, Vetoed, allowed_actions
from evalstop_service.domain.decision_events import (
    Event,
    GuardsChecked,
    GuardsRaised,
    Recovered,
    Reported,
    RunEnded,
    RunObeyed,
    RunResumed,
    StopDecided,
    TimePassed,
    WindowEnded,
    WindowReopened,
    apply_event,
)
from evalstop_service.domain.decision_lifecycle import (
    Action,
    Announce,
    Cancel,
    DecisionState,
    Guard,
    GuardKind,
    Instruction,
    Lifecycle,
    Mode,
    Refuse,
    Timeouts,
)
from evalstop_service.domain.event_types import EventType
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import NOW

TIMEOUTS = Timeouts(veto_window_seconds=60.0, confirm_seconds=900.0)
NO_VETO_WINDOW = Timeouts(veto_window_seconds=0.0, confirm_seconds=900.0)
BEGUN = Lifecycle(DecisionState.SHADOW, NOW)


def find_announced(instructions: list[Instruction]) -> list[str]:
    return [instruction.type for instruction in instructions if isinstance(instruction, Announce)]


def test_unconfirmed_park_is_requested_twice_and_never_forced() -> None:
    """A job that nobody parks goes on: the second deadline fails the decision."""
    decided = StopDecided(NOW, "policy", "", Mode.ENFORCE, (), action=Action.PARK)
    life, _ = apply_event(BEGUN, decided, NO_VETO_WINDOW)
    announced: list[list[str]] = []
    for period in (1, 2):
        event = TimePassed(NOW + timedelta(seconds=900 * period))
        life, instructions = apply_event(life, event, NO_VETO_WINDOW)
        announced.append(find_announced(instructions))
    assert announced == [[EventType.PARK_REQUESTED], [EventType.STOP_FAILED]]
    assert life.state is DecisionState.FAILED


@pytest.mark.parametrize(
    ("before", "informed", "after"),
    [
        ("pending", False, "vetoed"),
        ("on_hold", True, "vetoed"),
        ("requested", False, "moot"),
        ("escalated", False, "moot"),
        ("requested", True, "requested"),
        ("acknowledged", False, "acknowledged"),
        ("confirmed", False, "confirmed"),
    ],
)
def test_resumed_run_ends_a_stop_that_no_receiver_has(before: str, informed: bool, after: str) -> None:
    """The new attempt is not stopped for what an earlier one did; what a receiver has waits for its report."""
    life = Lifecycle(DecisionState(before), NOW + timedelta(seconds=60), NOW + timedelta(seconds=900))
    resumed, instructions = apply_event(life, RunResumed(NOW, 120, informed), TIMEOUTS)
    assert resumed.state == after
    assert isinstance(instructions[0], Cancel)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("pending", "moot"), ("on_hold", "moot"), ("requested", "undone"), ("parked", "undone")),
        *(("vetoed", "vetoed"), ("failed", "failed"), ("shadow", "shadow")),
    ],
)
def test_run_that_recovers_is_parked_no_longer(before: str, after: str) -> None:
    """A park that was not requested yet is moot, and any other is taken back; a stop stays."""
    event = Recovered(NOW, "policy", "the eval rose")
    for action, expected in ((Action.PARK, after), (Action.STOP, before)):
        life = Lifecycle(DecisionState(before), NOW + timedelta(seconds=60), action=action)
        recovered, instructions = apply_event(life, event, TIMEOUTS)
        assert recovered.state == expected
        assert find_announced(instructions) == [EventType.RESUME_REQUESTED] * (expected == "undone")


@pytest.mark.parametrize("action", Action)
def test_trainer_obeys_a_stop_and_no_park(action: Action) -> None:
    """A run that ends after a request to park it has not obeyed: it was to be set aside."""
    life = Lifecycle(DecisionState.REQUESTED, NOW, NOW + timedelta(seconds=900), action=action)
    after, _ = apply_event(life, RunObeyed(NOW, "key trainers"), TIMEOUTS)
    assert after.state is (DecisionState.OBEYED if action is Action.STOP else DecisionState.REQUESTED)
    vetoed = Lifecycle(DecisionState.VETOED, NOW, action=action)
    assert apply_event(vetoed, RunObeyed(NOW, "key trainers"), TIMEOUTS) == (vetoed, [])


def test_acknowledged_stop_is_not_failed_by_a_refusal() -> None:
    """The receiver that acknowledged it ends the job, whatever another one answered."""
    life = Lifecycle(DecisionState.ACKNOWLEDGED, NOW, NOW + timedelta(seconds=900))
    event = TimePassed(NOW, refusal="HTTP 413")
    assert apply_event(life, event, TIMEOUTS) == (life, [])


def test_stop_on_hold_without_a_verdict_is_left_alone() -> None:
    """Other guards are recorded only while the verdict calls for the stop; released, the veto window begins."""
    life = Lifecycle(DecisionState.ON_HOLD, NOW, NOW, guard_kinds=["paused"])
    guards = (Guard(GuardKind.STALE, "it is silent"),)
    after, instructions = apply_event(life, GuardsChecked(NOW, guards, False), TIMEOUTS)
    assert (after.guard_kinds, instructions) == (life.guard_kinds, [])
    released, _ = apply_event(after, Released(NOW, "dana", "it is fine", guards), TIMEOUTS)
    assert (released.state, released.due_at) == (DecisionState.PENDING, NOW + timedelta(seconds=60))
    again = apply_event(released, Released(NOW, "dana", "it is fine", guards), TIMEOUTS)
    assert again == (released, [])


def test_ordered_stop_ends_the_veto_window() -> None:
    """From the order on the trainer sees the stop."""
    life = Lifecycle(DecisionState.PENDING, NOW + timedelta(seconds=60))
    ordered, _ = apply_event(life, StopOrdered(NOW, "dana", "no more"), TIMEOUTS)
    assert (ordered.state, ordered.due_at) == (DecisionState.REQUESTED, NOW)


def test_stop_of_a_parked_job_is_escalated_anew() -> None:
    """How often receivers were asked to park the job does not shorten what they are given to stop it."""
    life = Lifecycle(DecisionState.PARKED, NOW, NOW, escalations=1, action=Action.PARK)
    life, _ = apply_event(life, StopOrdered(NOW, "dana", "no more"), NO_VETO_WINDOW)
    announced = []
    for period in range(1, 4):
        event = TimePassed(NOW + timedelta(seconds=900 * period))
        life, instructions = apply_event(life, event, NO_VETO_WINDOW)
        announced += find_announced(instructions)
    assert announced == [EventType.STOP_REQUESTED, EventType.STOP_ESCALATED, EventType.STOP_FAILED]


def test_parked_job_is_not_mentioned_before_its_reminder() -> None:
    """Of two processes that find a parked job overdue, the second finds a new deadline, and does nothing."""
    life = Lifecycle(DecisionState.PARKED, NOW, NOW, action=Action.PARK)
    reminded, instructions = apply_event(life, TimePassed(NOW), TIMEOUTS)
    assert find_announced(instructions) == [EventType.PARK_OVERDUE]
    assert apply_event(reminded, TimePassed(NOW), TIMEOUTS) == (reminded, [])


def test_failure_after_the_trainer_obeyed_is_announced() -> None:
    """The trainer ended its run, but its job could not be ended: a person has to look."""
    report = Reported(NOW, DecisionState.FAILED, "receiver", "the job remains", {})
    life, instructions = apply_event(Lifecycle(DecisionState.OBEYED, NOW), report, TIMEOUTS)
    assert life.state is DecisionState.FAILED
    assert find_announced(instructions) == [EventType.STOP_FAILED]


REFUSED_EVENTS: dict[str, tuple[DecisionState, Event]] = {
    "veto of an acknowledged stop": (DecisionState.ACKNOWLEDGED, Vetoed(NOW, "dana", "")),
    "veto of a shadow decision": (DecisionState.SHADOW, Vetoed(NOW, "dana", "")),
    "undo of a held-out decision": (DecisionState.HELD_OUT, Undone(NOW, "dana", "")),
    "release of a vetoed stop": (DecisionState.VETOED, Released(NOW, "dana", "", ())),
    "undo of a stop on hold": (DecisionState.ON_HOLD, Undone(NOW, "dana", "")),
    "failure after the confirmation": (
        DecisionState.CONFIRMED,
        Reported(NOW, DecisionState.FAILED, "receiver", "", {}),
    ),
    "acknowledgement after the failure": (
        DecisionState.FAILED,
        Reported(NOW, DecisionState.ACKNOWLEDGED, "receiver", "", {}),
    ),
    "report on a pending stop": (DecisionState.PENDING, Reported(NOW, DecisionState.CONFIRMED, "receiver", "", {})),
}


@pytest.mark.parametrize("case", REFUSED_EVENTS)
def test_contradicting_event_is_refused(case: str) -> None:
    """An event that contradicts the state is refused with a reason that names both, and changes nothing."""
    state, event = REFUSED_EVENTS[case]
    life = Lifecycle(state, NOW + timedelta(seconds=60))
    after, instructions = apply_event(life, event, TIMEOUTS)
    (refused,) = instructions
    assert isinstance(refused, Refuse)
    assert after == life
    command: Any = {Vetoed: "vetoed", Released: "released", Undone: "undone"}.get(type(event))
    assert f"the decision is {state}" in refused.why
    assert (command or str(getattr(event, "state", ""))) in refused.why


@pytest.mark.parametrize(
    ("state", "handed_over", "heard_at", "expected"),
    [
        (None, False, NOW, ["stop"]),
        (None, False, None, []),
        (DecisionState.SHADOW, False, NOW, ["stop"]),
        (DecisionState.PENDING, False, NOW, ["veto", "stop"]),
        (DecisionState.ON_HOLD, False, NOW, ["veto", "release", "stop"]),
        (DecisionState.REQUESTED, False, NOW, ["veto", "undo"]),
        (DecisionState.REQUESTED, True, NOW, ["undo"]),
        (DecisionState.FAILED, True, NOW, ["undo"]),
        (DecisionState.FAILED, True, None, []),
        (DecisionState.FAILED, True, NOW + timedelta(seconds=1), []),
        (DecisionState.PARKED, True, NOW, ["undo", "stop"]),
        (DecisionState.CONFIRMED, True, None, ["undo"]),
        (DecisionState.UNDONE, True, NOW, []),
        (DecisionState.VETOED, False, NOW, ["stop"]),
        (DecisionState.VETOED, False, None, []),
    ],
)
def test_people_are_offered_what_is_allowed(
    state: DecisionState | None, handed_over: bool, heard_at: datetime | None, expected: list[str]
) -> None:
    """A stop can be vetoed until it is handed over, undone afterwards unless it failed and the run went on, and ordered
    while the run continues."""
    life = None if state is None else Lifecycle(state, NOW, handed_over_at=NOW if handed_over else None, failed_at=NOW)
    assert allowed_actions(life, NOW, heard_at) == expected


DAY = NOW + timedelta(days=1)
ANY_EVENT: list[Event] = [
    *(TimePassed(DAY), TimePassed(DAY, attempt_over=True), TimePassed(DAY, refusal="HTTP 413")),
    *(WindowEnded(DAY, DAY), WindowReopened(DAY, DAY, "unheard"), GuardsChecked(DAY, (), verdict_stops=True)),
    *(
        GuardsChecked(DAY, (), verdict_stops=False, withdrawn="caught up"),
        GuardsRaised(DAY, (Guard(GuardKind.PAUSED, "paused"),)),
    ),
    *(Released(DAY, "dana", "fine"), StopOrdered(DAY, "dana", "no more"), Vetoed(DAY, "dana", "a dip")),
    *(Undone(DAY, "dana", "a dip", DAY), Recovered(DAY, "policy", "better"), RunEnded(DAY, "completed", True)),
    *(RunObeyed(DAY, "key trainers"), RunResumed(DAY, 120, receiver_informed=True)),
    *(Reported(DAY, state, "receiver", "", {}) for state in map(DecisionState, ("acknowledged", "failed"))),
    Reported(DAY, DecisionState.CONFIRMED, "key trainers", "made", {}),
]


@given(st.lists(st.sampled_from(ANY_EVENT), max_size=12), st.sampled_from([TIMEOUTS, NO_VETO_WINDOW]))
def test_copy_never_has_a_job_stopped_parked_or_resumed(events: list[Event], timeouts: Timeouts) -> None:
    """Whatever happens to a decision to copy a run, receivers are asked for that copy, or for nothing."""
    decided = StopDecided(NOW, "group g", "", Mode.ENFORCE, (), action=Action.EXPLOIT)
    life, instructions = apply_event(BEGUN, decided, timeouts)
    for event in events:
        life, following = apply_event(life, event, timeouts)
        instructions += following
    assert set(find_announced(instructions)) <= {EventType.EXPLOIT_PENDING, EventType.EXPLOIT_REQUESTED}
    assert life.action is Action.EXPLOIT


def test_resume_or_end_leaves_a_copy_moot_even_where_it_was_handed_over() -> None:
    """The run goes on without it, so that the rule may call again; one that was made stays confirmed."""
    for event in (RunResumed(DAY, 120, receiver_informed=True), RunEnded(DAY, "failed", receiver_informed=True)):
        for before, after in (("requested", "moot"), ("pending", "moot"), ("confirmed", "confirmed")):
            life = Lifecycle(DecisionState(before), NOW, action=Action.EXPLOIT, handed_over_at=NOW)
            assert apply_event(life, event, TIMEOUTS)[0].state == after
