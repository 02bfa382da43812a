"""The life of a decision holds its laws, whatever befalls it in whatever order."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from evalstop_service.rules import decision_lifecycle
from evalstop_service.rules.decision_lifecycle import (
    AWAITING,
    FOLLOWS,
    LET_RUN,
    PAUSED,
    RESUME_REQUESTED,
    STOP_ESCALATED,
    STOP_FAILED,
    STOP_ON_HOLD,
    STOP_REQUESTED,
    STOPPED,
    Announce,
    Cancel,
    Decided,
    Event,
    Finished,
    Guard,
    Held,
    Instruction,
    Life,
    Mode,
    Passed,
    Record,
    Refuse,
    Released,
    Reported,
    State,
    Terms,
    Undone,
    Vetoed,
    Weighed,
    WentOn,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.service.scenes import NOW

PAUSE = Guard(PAUSED, "the project is paused")
STALE = Guard("stale", "nothing was heard of the run for 12 minutes", {"seconds": 720})
GUARDS = st.sampled_from([(), (PAUSE,), (STALE,), (PAUSE, STALE)])
HELD_BY = st.sampled_from([(PAUSE,), (STALE,), (PAUSE, STALE)])
SECONDS = st.sampled_from([0.0, 1.0, 59.0, 60.0, 300.0, 901.0, 86_400.0])
REPORTS = st.sampled_from([State.ACKNOWLEDGED, State.CONFIRMED, State.FAILED])
TERMS = Terms(grace_seconds=60.0, confirm_seconds=900.0)
NO_GRACE = Terms(grace_seconds=0.0, confirm_seconds=900.0)

OVER = LET_RUN | frozenset({State.CONFIRMED, State.FAILED, State.VETOED, State.MOOT, State.UNDONE})
"""Where time alone changes nothing any more."""


class Lives(RuleBasedStateMachine):
    """One decision, the stop events that may still go out, and what went out."""

    @initialize(
        mode=st.sampled_from(Mode), guards=GUARDS, grace_seconds=st.sampled_from([0.0, 60.0]), held_out=st.booleans()
    )
    def begin(self, mode: Mode, guards: tuple[Guard, ...], grace_seconds: float, held_out: bool) -> None:
        self.now = NOW
        self.terms = Terms(grace_seconds, 900.0)
        self.history: list[Record] = []
        self.waiting: list[Announce] = []  # stops that wait for their time, or for a worker
        self.sent: list[str] = []
        decided = Decided(NOW, "policy", "three declines", mode, guards, held_out)
        self.life, instructions = decision_lifecycle.begin(decided, self.terms)
        self.obey(instructions)
        assert (self.life.state in LET_RUN) == (mode is Mode.SHADOW or held_out)

    def befall(self, event: Event) -> list[Instruction]:
        before = self.life
        self.life, instructions = decision_lifecycle.step(before, event, self.terms)
        if any(isinstance(one, Refuse) for one in instructions):
            assert len(instructions) == 1
            assert self.life == before
        self.obey(instructions)
        again, instructions_again = decision_lifecycle.step(self.life, event, self.terms)
        if not isinstance(event, WentOn):  # which cancels what is cancelled already
            assert again == self.life
            assert [one for one in instructions_again if not isinstance(one, Refuse)] == []
        return instructions

    def obey(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            match one:
                case Record():
                    self.history.append(one)
                case Announce(event_type) if event_type in (STOP_REQUESTED, STOP_ESCALATED):
                    self.waiting = [one]  # a stop asked for anew takes the place of the one before
                case Announce(event_type):
                    self.sent.append(event_type)
                case Cancel():
                    self.waiting = []

    @rule(seconds=SECONDS, gone_on=st.sampled_from([False, False, True]))
    def time_passes(self, seconds: float, gone_on: bool) -> None:
        self.now += timedelta(seconds=seconds)
        self.befall(Passed(self.now, gone_on))

    @rule()
    def a_worker_sends(self) -> None:
        if self.waiting and (self.waiting[0].due_at or self.now) <= self.now:
            self.befall(Passed(self.now))  # as a worker does before it claims
            assert self.life.state in AWAITING | {State.CONFIRMED, State.FAILED}, "handed out, and not meant to be"
            self.sent.append(self.waiting.pop().type)

    @rule(guards=GUARDS, wanted=st.booleans())
    def weigh(self, guards: tuple[Guard, ...], wanted: bool) -> None:
        state = self.life.state
        self.befall(Weighed(self.now, guards, wanted))
        if state is State.ON_HOLD:
            assert (self.life.state is State.ON_HOLD) == bool(guards or not wanted)

    @rule(guards=HELD_BY)
    def hold(self, guards: tuple[Guard, ...]) -> None:
        self.befall(Held(self.now, guards))
        assert self.life.state is not State.PENDING

    @rule(guards=GUARDS)
    def release(self, guards: tuple[Guard, ...]) -> None:
        state = self.life.state
        self.befall(Released(self.now, "dana", "it is fine", guards))
        if state is State.ON_HOLD:
            assert (self.life.state is State.ON_HOLD) == (PAUSE in guards)

    @rule()
    def veto(self) -> None:
        self.befall(Vetoed(self.now, "dana", "a known dip"))

    @rule()
    def undo(self) -> None:
        self.befall(Undone(self.now, "dana", "the eval was broken"))

    @precondition(lambda self: self.sent)
    @rule(state=REPORTS, seconds=SECONDS)
    def report(self, state: State, seconds: float) -> None:
        self.befall(Reported(self.now, state, "receiver", "as seen", {}, seconds))

    @rule(told=st.booleans())
    def finish(self, told: bool) -> None:
        self.befall(Passed(self.now))
        state = self.life.state
        self.befall(Finished(self.now, "completed", told))
        if state in AWAITING:
            waits = told or state is State.ACKNOWLEDGED
            assert self.life.state is (state if waits else State.MOOT), "only the scheduler's word ends what was told"

    @rule(told=st.booleans())
    def go_on(self, told: bool) -> None:
        self.befall(WentOn(self.now, 120, told))
        assert not self.waiting
        assert self.life.state not in (State.PENDING, State.ON_HOLD)

    @invariant()
    def history_replays(self) -> None:
        """The history tells the state, what followed what, the escalations, and what the row does not hold."""
        states = [one.state for one in self.history]
        assert states[-1] is self.life.state
        for one, other in pairwise(states):
            assert other in FOLLOWS[one] or (one is other and one in (State.ON_HOLD, State.ESCALATED, State.UNDONE))
        assert states.count(State.ESCALATED) == self.life.escalations
        told = decision_lifecycle.remembered((one.state, one.details) for one in self.history)
        assert told == (self.life.held_by, self.life.heard)

    @invariant()
    def deadlines_stand_where_they_belong(self) -> None:
        assert (self.life.deadline_at is not None) == (self.life.state in AWAITING | {State.ON_HOLD})

    @invariant()
    def asks_once_a_rung(self) -> None:
        """A stop is sent once, and once more for each rung of the ladder, and harder on the second alone."""
        stops = [one for one in self.sent if one in (STOP_REQUESTED, STOP_ESCALATED)]
        assert len(stops) <= 1 + self.life.escalations
        assert stops.count(STOP_ESCALATED) <= (self.life.escalations == 2)

    @invariant()
    def nothing_waits_for_what_is_over(self) -> None:
        if self.life.state in LET_RUN | {State.ON_HOLD, State.VETOED, State.MOOT, State.UNDONE}:
            assert not self.waiting

    @invariant()
    def what_is_let_run_stays_so(self) -> None:
        """Whatever befalls it, nobody is told of it: the run has to go on to its own end."""
        if self.history[0].state in LET_RUN:
            assert len(self.history) == 1
            assert not self.sent

    @invariant()
    def each_end_is_told_once(self) -> None:
        entered = [one.state for one in self.history]
        assert self.sent.count(STOPPED) == entered.count(State.CONFIRMED)
        assert self.sent.count(STOP_FAILED) == entered.count(State.FAILED)
        assert self.sent.count(RESUME_REQUESTED) == (State.UNDONE in entered)
        assert self.sent.count(STOP_ON_HOLD) == entered.count(State.ON_HOLD)

    def teardown(self) -> None:
        """Time alone brings it to an end, once nothing holds it back."""
        if not hasattr(self, "life"):
            return
        self.befall(Weighed(self.now, (), wanted=True))
        for _ in range(5):
            self.now += timedelta(days=1)
            self.befall(Passed(self.now))
        assert self.life.state in OVER


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)


def test_the_ladder() -> None:
    """Not confirmed in time: asked for again, then harder, then a person is told; each rung has its own deadline."""
    life, _ = decision_lifecycle.begin(Decided(NOW, "policy", "", Mode.ENFORCE, ()), NO_GRACE)
    told: list[list[str]] = []
    for turn in range(1, 4):
        at = NOW + timedelta(seconds=900 * turn)
        assert decision_lifecycle.step(life, Passed(at - timedelta(seconds=1)), NO_GRACE) == (life, [])
        life, instructions = decision_lifecycle.step(life, Passed(at), NO_GRACE)
        told.append([one.type for one in instructions if isinstance(one, Announce)])
    assert told == [[STOP_REQUESTED], [STOP_ESCALATED], [STOP_FAILED]]
    assert (life.state, life.deadline_at) == (State.FAILED, None)
    life, _ = decision_lifecycle.step(life, Reported(at, State.CONFIRMED, "receiver", "gone at last", {}), NO_GRACE)
    assert life.state is State.CONFIRMED


def test_an_attempt_that_is_over_is_not_asked_for_again() -> None:
    """To ask again for a stop whose run has gone on might end the job that goes on: a person is told instead."""
    life, _ = decision_lifecycle.begin(Decided(NOW, "policy", "", Mode.ENFORCE, ()), NO_GRACE)
    life, instructions = decision_lifecycle.step(life, Passed(NOW + timedelta(seconds=900), gone_on=True), NO_GRACE)
    assert life.state is State.FAILED
    assert [one.type for one in instructions if isinstance(one, Announce)] == [STOP_FAILED]


def test_who_acknowledges_gets_the_time_it_asks_for() -> None:
    """The deadline of a stop that is under way is so far off as its receiver said, and the project's patience more."""
    life, _ = decision_lifecycle.begin(Decided(NOW, "policy", "", Mode.ENFORCE, ()), NO_GRACE)
    at = NOW + timedelta(seconds=10)
    life, _ = decision_lifecycle.step(life, Reported(at, State.ACKNOWLEDGED, "receiver", "", {}, 120.0), NO_GRACE)
    assert life == Life(State.ACKNOWLEDGED, NOW, at + timedelta(seconds=1020))


REFUSED: dict[str, tuple[State, Event]] = {
    "a veto of what was handed out": (State.ACKNOWLEDGED, Vetoed(NOW, "dana", "")),
    "a veto of a shadow": (State.SHADOW, Vetoed(NOW, "dana", "")),
    "an undo of what is held out": (State.HELD_OUT, Undone(NOW, "dana", "")),
    "a release of what was vetoed": (State.VETOED, Released(NOW, "dana", "", ())),
    "an undo of what was not handed out": (State.ON_HOLD, Undone(NOW, "dana", "")),
    "a failure after the end": (State.CONFIRMED, Reported(NOW, State.FAILED, "receiver", "", {})),
    "a beginning after the failure": (State.FAILED, Reported(NOW, State.ACKNOWLEDGED, "receiver", "", {})),
    "a report on what nobody was told of": (State.PENDING, Reported(NOW, State.CONFIRMED, "receiver", "", {})),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_follow_is_refused(case: str) -> None:
    """What contradicts the state is refused with both of them named, and changes nothing."""
    state, event = REFUSED[case]
    life = Life(state, NOW + timedelta(seconds=60))
    after, instructions = decision_lifecycle.step(life, event, TERMS)
    (refused,) = instructions
    assert isinstance(refused, Refuse)
    assert after == life
    wanted: Any = {Vetoed: "vetoed", Released: "released", Undone: "undone"}.get(type(event))
    assert f"the decision is {state}" in refused.why
    assert (wanted or str(getattr(event, "state", ""))) in refused.why
