"""The life of a decision holds its laws, whatever befalls it in whatever order."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from evalstop_service.rules import decision_transitions
from evalstop_service.rules.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    NEXT_STATES,
    OBSERVED,
    STOPPED,
    STOPPING,
    Action,
    Announce,
    Cancel,
    DecisionState,
    Event,
    Guard,
    GuardKind,
    GuardsChecked,
    GuardsRaised,
    Instruction,
    Lifecycle,
    Mode,
    Record,
    Recovered,
    Refuse,
    Released,
    Reported,
    RunEnded,
    RunObeyed,
    RunResumed,
    StopDecided,
    StopOrdered,
    Timeouts,
    TimePassed,
    Undone,
    Vetoed,
)
from evalstop_service.rules.event_types import REQUEST_EVENTS, EventType
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.service.project_fixture import NOW

PAUSE = Guard(GuardKind.PAUSED, "the project is paused")
STALE = Guard(GuardKind.STALE, "nothing was heard of the run for 12 minutes", {"seconds": 720})
GUARDS = st.sampled_from([(), (PAUSE,), (STALE,), (PAUSE, STALE)])
HELD_BY = st.sampled_from([(PAUSE,), (STALE,), (PAUSE, STALE)])
SECONDS = st.sampled_from([0.0, 1.0, 59.0, 60.0, 300.0, 901.0, 86_400.0])
REPORTS = st.sampled_from(
    [DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED, DecisionState.PARKED, DecisionState.FAILED]
)
TERMS = Timeouts(veto_window_seconds=60.0, confirm_seconds=900.0)
NO_GRACE = Timeouts(veto_window_seconds=0.0, confirm_seconds=900.0)

OVER = (
    OBSERVED
    | STOPPED
    | {
        DecisionState.PARKED,
        DecisionState.FAILED,
        DecisionState.VETOED,
        DecisionState.MOOT,
        DecisionState.UNDONE,
    }
)
"""Where time alone changes nothing any more, but that people are reminded of what is parked."""


class Lives(RuleBasedStateMachine):
    """One decision, the stop events that may still go out, and what went out."""

    @initialize(
        mode=st.sampled_from(Mode),
        guards=GUARDS,
        veto_window_seconds=st.sampled_from([0.0, 60.0]),
        held_out=st.booleans(),
        action=st.sampled_from(Action),
    )
    def begin(
        self, mode: Mode, guards: tuple[Guard, ...], veto_window_seconds: float, held_out: bool, action: Action
    ) -> None:
        self.now = NOW
        self.terms = Timeouts(veto_window_seconds, 900.0)
        self.history: list[Record] = []
        self.waiting: list[Announce] = []  # stops that wait for their time, or for a worker
        self.sent: list[str] = []
        decided = StopDecided(NOW, "policy", "three declines", mode, guards, held_out, action=action)
        self.life, instructions = decision_transitions.start_lifecycle(decided, self.terms)
        self.obey(instructions)
        assert (self.life.state in OBSERVED) == (mode is Mode.SHADOW or held_out)

    def befall(self, event: Event) -> list[Instruction]:
        before = self.life
        self.life, instructions = decision_transitions.apply_event(before, event, self.terms)
        if any(isinstance(one, Refuse) for one in instructions):
            assert len(instructions) == 1
            assert self.life == before
        self.obey(instructions)
        again, instructions_again = decision_transitions.apply_event(self.life, event, self.terms)
        # What is cancelled is cancelled again by a resume, and an order that was carried out is refused.
        if not isinstance(event, RunResumed):
            assert again == self.life
            assert [one for one in instructions_again if not isinstance(one, Refuse)] == []
        return instructions

    def obey(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            match one:
                case Record():
                    self.history.append(one)
                case Announce(event_type) if event_type in REQUEST_EVENTS:
                    self.waiting = [one]  # a stop asked for anew takes the place of the one before
                case Announce(event_type):
                    self.sent.append(event_type)
                case Cancel():
                    self.waiting = []

    @rule(seconds=SECONDS, gone_on=st.sampled_from([False, False, True]))
    def time_passes(self, seconds: float, gone_on: bool) -> None:
        self.now += timedelta(seconds=seconds)
        self.befall(TimePassed(self.now, gone_on))

    @rule()
    def a_worker_sends(self) -> None:
        if self.waiting and (self.waiting[0].due_at or self.now) <= self.now:
            self.befall(TimePassed(self.now))  # as a worker does before it claims
            assert (self.waiting[0].type == EventType.PARK_REQUESTED) == (self.life.action is Action.PARK)
            assert self.life.state in STOPPING, "handed out, and not meant to be"
            self.sent.append(self.waiting.pop().type)

    @rule(guards=GUARDS, wanted=st.booleans())
    def weigh(self, guards: tuple[Guard, ...], wanted: bool) -> None:
        state = self.life.state
        self.befall(GuardsChecked(self.now, guards, wanted))
        if state is DecisionState.ON_HOLD:
            assert (self.life.state is DecisionState.ON_HOLD) == bool(guards or not wanted)

    @rule(guards=HELD_BY)
    def hold(self, guards: tuple[Guard, ...]) -> None:
        self.befall(GuardsRaised(self.now, guards))
        assert self.life.state is not DecisionState.PENDING

    @rule(guards=GUARDS)
    def release(self, guards: tuple[Guard, ...]) -> None:
        state = self.life.state
        self.befall(Released(self.now, "dana", "it is fine", guards))
        if state is DecisionState.ON_HOLD:
            assert (self.life.state is DecisionState.ON_HOLD) == (PAUSE in guards)

    @rule()
    def veto(self) -> None:
        self.befall(Vetoed(self.now, "dana", "a known dip"))

    @rule()
    def undo(self) -> None:
        self.befall(Undone(self.now, "dana", "the eval was broken"))

    @precondition(lambda self: self.sent)
    @rule(state=REPORTS, seconds=SECONDS)
    def report(self, state: DecisionState, seconds: float) -> None:
        self.befall(Reported(self.now, state, "receiver", "as seen", {}, seconds))

    @rule()
    def recover(self) -> None:
        self.befall(TimePassed(self.now))
        before = self.life
        self.befall(Recovered(self.now, "policy", "the eval rose again"))
        if before.action is Action.STOP or before.state in OVER - {DecisionState.PARKED}:
            assert self.life == before, "only what is, or is to be, parked returns"
        else:
            assert self.life.state in (DecisionState.MOOT, DecisionState.UNDONE)

    @precondition(lambda self: self.life.state is DecisionState.PARKED)
    @rule()
    def stop_for_good(self) -> None:
        self.befall(StopOrdered(self.now, "dana", "no more of this"))
        assert (self.life.state, self.life.action) == (DecisionState.REQUESTED, Action.STOP)

    @rule(told=st.booleans())
    def finish(self, told: bool) -> None:
        self.befall(TimePassed(self.now))
        state = self.life.state
        self.befall(RunEnded(self.now, "completed", told))
        if state in AWAITING_CONFIRMATION:
            waits = told or state is DecisionState.ACKNOWLEDGED
            assert self.life.state is (state if waits else DecisionState.MOOT), (
                "only the scheduler's word ends what was told"
            )

    @rule()
    def trainer_obeys(self) -> None:
        self.befall(TimePassed(self.now))
        state = self.life.state
        self.befall(RunObeyed(self.now, "key trainers"))
        may_obey = state in AWAITING_CONFIRMATION | {DecisionState.FAILED} and self.life.action is Action.STOP
        assert (self.life.state is DecisionState.OBEYED) == (may_obey or state is DecisionState.OBEYED)

    @rule(told=st.booleans())
    def go_on(self, told: bool) -> None:
        self.befall(RunResumed(self.now, 120, told))
        assert not self.waiting
        assert self.life.state not in (DecisionState.PENDING, DecisionState.ON_HOLD)

    @invariant()
    def history_replays(self) -> None:
        """The history tells the state, what followed what, the escalations, and what the row does not hold."""
        states = [one.state for one in self.history]
        assert states[-1] is self.life.state
        for one, other in pairwise(states):
            assert other in NEXT_STATES[one] or (
                one is other
                and one in (DecisionState.ON_HOLD, DecisionState.ESCALATED, DecisionState.UNDONE, DecisionState.PARKED)
            )
        since_order = states[self._find_order(states) :]
        assert since_order.count(DecisionState.ESCALATED) == self.life.escalations
        undone = [one.details for one in self.history if one.state is DecisionState.UNDONE]
        assert decision_transitions.list_late_reports(undone) == self.life.late_reports

    @invariant()
    def deadlines_stand_where_they_belong(self) -> None:
        assert (self.life.deadline_at is not None) == (
            self.life.state in AWAITING_CONFIRMATION | {DecisionState.ON_HOLD, DecisionState.PARKED}
        )

    @invariant()
    def asks_once_a_rung(self) -> None:
        """A stop is sent once, and once more for each rung of the ladder, and harder on the second alone."""
        stops = [one for one in self.sent if one in (EventType.STOP_REQUESTED, EventType.STOP_ESCALATED)]
        assert len(stops) <= 1 + self.life.escalations
        assert stops.count(EventType.STOP_ESCALATED) <= (self.life.escalations == 2)
        assert self.sent.count(EventType.PARK_REQUESTED) <= 2
        if self.life.action is Action.PARK:
            assert not stops, "nobody is stopped who is to be parked"

    @invariant()
    def nothing_waits_for_what_is_over(self) -> None:
        if self.life.state in OBSERVED | {
            DecisionState.ON_HOLD,
            DecisionState.VETOED,
            DecisionState.MOOT,
            DecisionState.UNDONE,
        }:
            assert not self.waiting

    @invariant()
    def what_is_observed_stays_so(self) -> None:
        """Whatever befalls it, nobody is told of it: the run has to go on to its own end."""
        if self.history[0].state in OBSERVED:
            assert len(self.history) == 1
            assert not self.sent

    @invariant()
    def each_end_is_told_once(self) -> None:
        entered = [one.state for one in self.history]
        told_already = list(pairwise(entered)).count((DecisionState.OBEYED, DecisionState.CONFIRMED))
        reminders = self.sent.count(EventType.PARK_OVERDUE)
        assert self.sent.count(EventType.PARKED) == entered.count(DecisionState.PARKED) - reminders
        ends = entered.count(DecisionState.CONFIRMED) + entered.count(DecisionState.OBEYED)
        assert self.sent.count(EventType.STOPPED) == ends - told_already
        assert self.sent.count(EventType.STOP_FAILED) == entered.count(DecisionState.FAILED)
        assert self.sent.count(EventType.RESUME_REQUESTED) == (DecisionState.UNDONE in entered)
        assert self.sent.count(EventType.STOP_ON_HOLD) == entered.count(DecisionState.ON_HOLD)

    @staticmethod
    def _find_order(states: list[DecisionState]) -> int:
        """Where a person had the parked job stopped for good; the count of escalations begins anew there."""
        moves = list(pairwise(states))
        ordered = (DecisionState.PARKED, DecisionState.REQUESTED)
        return moves.index(ordered) + 1 if ordered in moves else 0

    def teardown(self) -> None:
        """Time alone brings it to an end, once nothing holds it back."""
        if not hasattr(self, "life"):
            return
        self.befall(GuardsChecked(self.now, (), verdict_stops=True))
        for _ in range(5):
            self.now += timedelta(days=1)
            self.befall(TimePassed(self.now))
        assert self.life.state in OVER


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)


def test_the_ladder() -> None:
    """Not confirmed in time: asked for again, then harder, then a person is told; each rung has its own deadline."""
    life, _ = decision_transitions.start_lifecycle(StopDecided(NOW, "policy", "", Mode.ENFORCE, ()), NO_GRACE)
    told: list[list[str]] = []
    for turn in range(1, 4):
        at = NOW + timedelta(seconds=900 * turn)
        assert decision_transitions.apply_event(life, TimePassed(at - timedelta(seconds=1)), NO_GRACE) == (life, [])
        life, instructions = decision_transitions.apply_event(life, TimePassed(at), NO_GRACE)
        told.append([one.type for one in instructions if isinstance(one, Announce)])
    assert told == [[EventType.STOP_REQUESTED], [EventType.STOP_ESCALATED], [EventType.STOP_FAILED]]
    assert (life.state, life.deadline_at) == (DecisionState.FAILED, None)
    life, _ = decision_transitions.apply_event(
        life, Reported(at, DecisionState.CONFIRMED, "receiver", "gone at last", {}), NO_GRACE
    )
    assert life.state is DecisionState.CONFIRMED


def test_an_attempt_that_is_over_is_not_asked_for_again() -> None:
    """To ask again for a stop whose run has gone on might end the job that goes on: a person is told instead."""
    life, _ = decision_transitions.start_lifecycle(StopDecided(NOW, "policy", "", Mode.ENFORCE, ()), NO_GRACE)
    life, instructions = decision_transitions.apply_event(
        life, TimePassed(NOW + timedelta(seconds=900), attempt_over=True), NO_GRACE
    )
    assert life.state is DecisionState.FAILED
    assert [one.type for one in instructions if isinstance(one, Announce)] == [EventType.STOP_FAILED]


def test_who_acknowledges_gets_the_time_it_asks_for() -> None:
    """The deadline of a stop that is under way is so far off as its receiver said, and the project's patience more."""
    life, _ = decision_transitions.start_lifecycle(StopDecided(NOW, "policy", "", Mode.ENFORCE, ()), NO_GRACE)
    at = NOW + timedelta(seconds=10)
    life, _ = decision_transitions.apply_event(
        life, Reported(at, DecisionState.ACKNOWLEDGED, "receiver", "", {}, 120.0), NO_GRACE
    )
    assert life == Lifecycle(DecisionState.ACKNOWLEDGED, NOW, at + timedelta(seconds=1020))


REFUSED: dict[str, tuple[DecisionState, Event]] = {
    "a veto of what was handed out": (DecisionState.ACKNOWLEDGED, Vetoed(NOW, "dana", "")),
    "a veto of a shadow": (DecisionState.SHADOW, Vetoed(NOW, "dana", "")),
    "an undo of what is held out": (DecisionState.HELD_OUT, Undone(NOW, "dana", "")),
    "a release of what was vetoed": (DecisionState.VETOED, Released(NOW, "dana", "", ())),
    "an undo of what was not handed out": (DecisionState.ON_HOLD, Undone(NOW, "dana", "")),
    "a failure after the end": (DecisionState.CONFIRMED, Reported(NOW, DecisionState.FAILED, "receiver", "", {})),
    "a beginning after the failure": (
        DecisionState.FAILED,
        Reported(NOW, DecisionState.ACKNOWLEDGED, "receiver", "", {}),
    ),
    "a report on what nobody was told of": (
        DecisionState.PENDING,
        Reported(NOW, DecisionState.CONFIRMED, "receiver", "", {}),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_follow_is_refused(case: str) -> None:
    """What contradicts the state is refused with both of them named, and changes nothing."""
    state, event = REFUSED[case]
    life = Lifecycle(state, NOW + timedelta(seconds=60))
    after, instructions = decision_transitions.apply_event(life, event, TERMS)
    (refused,) = instructions
    assert isinstance(refused, Refuse)
    assert after == life
    wanted: Any = {Vetoed: "vetoed", Released: "released", Undone: "undone"}.get(type(event))
    assert f"the decision is {state}" in refused.why
    assert (wanted or str(getattr(event, "state", ""))) in refused.why
