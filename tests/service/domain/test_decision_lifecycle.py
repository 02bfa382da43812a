"""The life cycle of a decision keeps its invariants under any sequence of events."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

from evalstop_service.domain import decision_events
from evalstop_service.domain.decision_commands import Released, StopOrdered, Undone, Vetoed
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
)
from evalstop_service.domain.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    NEXT_STATES,
    OBSERVED,
    STOPPED,
    STOPPING,
    VETOABLE,
    Action,
    Announce,
    Cancel,
    DecisionState,
    Guard,
    GuardKind,
    Instruction,
    Lifecycle,
    Mode,
    Record,
    Refuse,
    Timeouts,
)
from evalstop_service.domain.event_types import REQUEST_EVENTS, EventType
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.service.project_fixture import NOW

PAUSED = Guard(GuardKind.PAUSED, "the project is paused")
STALE = Guard(GuardKind.STALE, "nothing was heard of the run for 12 minutes", {"seconds": 720})
GUARDS = st.sampled_from([(), (PAUSED,), (STALE,), (PAUSED, STALE)])
HOLDING_GUARDS = st.sampled_from([(PAUSED,), (STALE,), (PAUSED, STALE)])
SECONDS = st.sampled_from([0.0, 1.0, 59.0, 60.0, 300.0, 901.0, 86_400.0])
REPORTS = st.sampled_from(
    [DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED, DecisionState.PARKED, DecisionState.FAILED]
)

REPEATED = {
    DecisionState.ON_HOLD,
    DecisionState.PENDING,
    DecisionState.ESCALATED,
    DecisionState.UNDONE,
    DecisionState.PARKED,
    DecisionState.FAILED,
}
"""States of which the history may hold several records in a row: for other guards, a later end of the window, another
escalation, a late report, a reminder, and the end of the run that a failed stop left running."""

FINAL_STATES = (
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
"""States that time alone does not leave; a parked run only repeats its reminder."""

STOPPABLE = OBSERVED | {
    DecisionState.ON_HOLD,
    DecisionState.PENDING,
    DecisionState.VETOED,
    DecisionState.PARKED,
}
"""States in which a person can have the run stopped at once."""


class LifecycleMachine(RuleBasedStateMachine):
    """One decision, its stop events that may still be sent, and those that were sent."""

    @initialize(
        mode=st.sampled_from(Mode),
        guards=GUARDS,
        veto_window_seconds=st.sampled_from([0.0, 60.0]),
        held_out=st.booleans(),
        action=st.sampled_from([Action.STOP, Action.PARK]),
    )
    def start_decision(
        self, mode: Mode, guards: tuple[Guard, ...], veto_window_seconds: float, held_out: bool, action: Action
    ) -> None:
        self.now = NOW
        self.timeouts = Timeouts(veto_window_seconds, 900.0)
        self.history: list[Record] = []
        self.waiting: list[Announce] = []  # stops that wait for their due time or for a worker
        self.sent: list[str] = []
        decided = StopDecided(NOW, "policy", "three declines", mode, guards, held_out, action=action)
        self.lifecycle, instructions = decision_events.apply_event(
            Lifecycle(DecisionState.SHADOW, NOW), decided, self.timeouts
        )
        self.execute_instructions(instructions)
        assert (self.lifecycle.state in OBSERVED) == (mode is Mode.SHADOW or held_out)

    def apply_event(self, event: Event) -> list[Instruction]:
        before = self.lifecycle
        self.lifecycle, instructions = decision_events.apply_event(before, event, self.timeouts)
        if any(isinstance(instruction, Refuse) for instruction in instructions):
            assert len(instructions) == 1
            assert self.lifecycle == before
        self.execute_instructions(instructions)
        again, instructions_again = decision_events.apply_event(self.lifecycle, event, self.timeouts)
        # A resume cancels again, and a repeated command may be refused; otherwise repeating changes nothing.
        if not isinstance(event, RunResumed):
            assert again == self.lifecycle
            assert [instruction for instruction in instructions_again if not isinstance(instruction, Refuse)] == []
        return instructions

    def execute_instructions(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Record():
                    self.history.append(instruction)
                case Announce(event_type) if event_type in REQUEST_EVENTS:
                    self.waiting = [instruction]  # a new request replaces the waiting one
                case Announce(event_type):
                    self.sent.append(event_type)
                case Cancel():
                    self.waiting = []

    @rule(
        seconds=SECONDS,
        gone_on=st.sampled_from([False, False, True]),
        refusal=st.sampled_from([None, None, "HTTP 413"]),
    )
    def pass_time(self, seconds: float, gone_on: bool, refusal: str | None) -> None:
        self.now += timedelta(seconds=seconds)
        self.apply_event(TimePassed(self.now))
        state = self.lifecycle.state
        self.apply_event(TimePassed(self.now, gone_on, refusal))
        if refusal is not None and state in (DecisionState.REQUESTED, DecisionState.ESCALATED):
            assert self.lifecycle.state is DecisionState.FAILED

    @rule(unheard_seconds=SECONDS)
    def end_window(self, unheard_seconds: float) -> None:
        """Listeners have heard all vetoes, but for those of the last seconds."""
        was_pending = self.lifecycle.state is DecisionState.PENDING
        heard_until = self.now - timedelta(seconds=unheard_seconds)
        self.apply_event(WindowEnded(self.now, heard_until))
        if was_pending:
            is_over = self.lifecycle.due_at <= heard_until
            assert (self.lifecycle.state is DecisionState.REQUESTED) == is_over, "only hearing ends a window"

    @precondition(lambda self: self.waiting)
    @rule()
    def send_by_worker(self) -> None:
        assert (self.waiting[0].type == EventType.PARK_REQUESTED) == (self.lifecycle.action is Action.PARK)
        assert self.lifecycle.state in STOPPING, "a request was sent in a state that does not stop the run"
        self.sent.append(self.waiting.pop().type)
        self.hand_over("the receiver slurm-a")

    @precondition(lambda self: self.lifecycle.state in STOPPING)
    @rule()
    def tell_trainer(self) -> None:
        self.hand_over("the trainer")

    def hand_over(self, receiver: str) -> None:
        """As the store does in the transaction of a claim, and before an answer."""
        if self.lifecycle.handed_over_at is None:
            self.lifecycle = replace(self.lifecycle, handed_over_at=self.now, handed_over_to=receiver)

    @rule(guards=GUARDS, still_wanted=st.booleans())
    def check_guards(self, guards: tuple[Guard, ...], still_wanted: bool) -> None:
        state = self.lifecycle.state
        self.apply_event(GuardsChecked(self.now, guards, still_wanted))
        if state is DecisionState.ON_HOLD:
            assert (self.lifecycle.state is DecisionState.ON_HOLD) == bool(guards or not still_wanted)

    @rule(guards=HOLDING_GUARDS)
    def raise_guards(self, guards: tuple[Guard, ...]) -> None:
        self.apply_event(GuardsRaised(self.now, guards))
        assert self.lifecycle.state is not DecisionState.PENDING

    @rule(guards=GUARDS)
    def release(self, guards: tuple[Guard, ...]) -> None:
        state = self.lifecycle.state
        self.apply_event(Released(self.now, "dana", "it is fine", guards))
        if state is DecisionState.ON_HOLD:
            assert (self.lifecycle.state is DecisionState.ON_HOLD) == (PAUSED in guards)

    @rule()
    def veto(self) -> None:
        """A veto sent before the hand-over is heard, whatever the time; after it, the refusal says when and to whom."""
        before = self.lifecycle
        instructions = self.apply_event(Vetoed(self.now, "dana", "a known dip"))
        if before.state in VETOABLE and before.handed_over_at is None:
            assert (self.lifecycle.state, self.waiting) == (DecisionState.VETOED, [])
        elif before.handed_over_at is not None:
            (refused,) = instructions
            assert isinstance(refused, Refuse)
            assert str(before.handed_over_to) in refused.why
            assert before.handed_over_at.isoformat() in refused.why

    @rule()
    def undo(self) -> None:
        self.apply_event(Undone(self.now, "dana", "the eval was broken"))

    @precondition(lambda self: self.sent)
    @rule(state=REPORTS, seconds=SECONDS)
    def report_state(self, state: DecisionState, seconds: float) -> None:
        self.apply_event(Reported(self.now, state, "receiver", "as seen", {}, seconds))

    @rule()
    def recover_eval(self) -> None:
        self.apply_event(TimePassed(self.now))
        before = self.lifecycle
        self.apply_event(Recovered(self.now, "policy", "the eval rose again"))
        if before.action is Action.STOP or before.state in FINAL_STATES - {DecisionState.PARKED}:
            assert self.lifecycle == before, "only a park can be taken back by a recovery"
        else:
            assert self.lifecycle.state in (DecisionState.MOOT, DecisionState.UNDONE)

    @rule(paused=st.sampled_from([False, False, True]))
    def order_stop(self, paused: bool) -> None:
        self.apply_event(TimePassed(self.now))
        before = self.lifecycle
        self.apply_event(StopOrdered(self.now, "dana", "no more of this", paused))
        if before.state in STOPPABLE and not paused:
            assert (self.lifecycle.state, self.lifecycle.action) == (DecisionState.REQUESTED, Action.STOP)
            assert [stop.type for stop in self.waiting] == [EventType.STOP_REQUESTED]
        else:
            assert self.lifecycle == before

    @rule(announced=st.booleans())
    def end_run(self, announced: bool) -> None:
        self.apply_event(TimePassed(self.now))
        state = self.lifecycle.state
        self.apply_event(RunEnded(self.now, "completed", announced))
        if state in AWAITING_CONFIRMATION:
            waits = announced or state is DecisionState.ACKNOWLEDGED
            assert self.lifecycle.state is (state if waits else DecisionState.MOOT), (
                "a delivered stop ends only with its receiver's report"
            )

    @rule()
    def trainer_obeys(self) -> None:
        self.apply_event(TimePassed(self.now))
        state = self.lifecycle.state
        self.apply_event(RunObeyed(self.now, "key trainers"))
        may_obey = state in AWAITING_CONFIRMATION | {DecisionState.FAILED} and self.lifecycle.action is Action.STOP
        assert (self.lifecycle.state is DecisionState.OBEYED) == (may_obey or state is DecisionState.OBEYED)

    @rule(announced=st.booleans())
    def resume_run(self, announced: bool) -> None:
        self.apply_event(RunResumed(self.now, 120, announced))
        assert not self.waiting
        assert self.lifecycle.state not in (DecisionState.PENDING, DecisionState.ON_HOLD)

    @invariant()
    def history_matches_the_state(self) -> None:
        """The history gives the state, valid transitions and the escalations."""
        states = [record.state for record in self.history]
        assert states[-1] is self.lifecycle.state
        for state, following in pairwise(states):
            assert following in NEXT_STATES[state] or (state is following and state in REPEATED)
        since_restart = states[self._find_restart() :]
        assert since_restart.count(DecisionState.ESCALATED) == self.lifecycle.escalations

    @invariant()
    def deadline_exists_in_open_states(self) -> None:
        assert (self.lifecycle.deadline_at is not None) == (
            self.lifecycle.state in AWAITING_CONFIRMATION | {DecisionState.ON_HOLD}
        )

    @invariant()
    def stop_is_requested_once_per_escalation(self) -> None:
        """A stop is requested once, once more for the first escalation, and escalated once."""
        stops = [event for event in self.sent if event in (EventType.STOP_REQUESTED, EventType.STOP_ESCALATED)]
        assert len(stops) <= 1 + self.lifecycle.escalations
        assert stops.count(EventType.STOP_ESCALATED) <= (self.lifecycle.escalations == 2)
        assert self.sent.count(EventType.PARK_REQUESTED) <= 2
        if self.lifecycle.action is Action.PARK:
            assert not stops, "a park sends no stop"

    @invariant()
    def no_stop_waits_in_a_final_state(self) -> None:
        if self.lifecycle.state in OBSERVED | {
            DecisionState.ON_HOLD,
            DecisionState.VETOED,
            DecisionState.MOOT,
            DecisionState.UNDONE,
        }:
            assert not self.waiting

    @invariant()
    def observed_decision_sends_nothing(self) -> None:
        """A shadow or held-out decision never changes and sends no events, unless a person orders the stop."""
        if self.history[0].state in OBSERVED and not self._list_orders():
            assert len(self.history) == 1
            assert not self.sent

    @invariant()
    def each_end_is_announced_once(self) -> None:
        states_entered = [record.state for record in self.history]
        confirmed_after_obeying = list(pairwise(states_entered)).count((DecisionState.OBEYED, DecisionState.CONFIRMED))
        reminders = self.sent.count(EventType.PARK_OVERDUE)
        assert self.sent.count(EventType.PARKED) == states_entered.count(DecisionState.PARKED) - reminders
        ends = states_entered.count(DecisionState.CONFIRMED) + states_entered.count(DecisionState.OBEYED)
        assert self.sent.count(EventType.STOPPED) == ends - confirmed_after_obeying
        ended_after_failing = list(pairwise(states_entered)).count((DecisionState.FAILED, DecisionState.FAILED))
        failures = states_entered.count(DecisionState.FAILED) - ended_after_failing
        assert self.sent.count(EventType.STOP_FAILED) == failures
        assert self.sent.count(EventType.RESUME_REQUESTED) == (DecisionState.UNDONE in states_entered)
        assert self.sent.count(EventType.STOP_ON_HOLD) == states_entered.count(DecisionState.ON_HOLD)

    def _list_orders(self) -> list[int]:
        """Where in the history a person ordered the stop."""
        return [place for place, record in enumerate(self.history) if "ordered" in record.details]

    def _find_restart(self) -> int:
        """Find where the count of escalations restarts: where the stop was last ordered, or where it last waited."""
        waiting = (DecisionState.PENDING, DecisionState.ON_HOLD)
        waits = [place for place, record in enumerate(self.history) if record.state in waiting]
        return max(self._list_orders() + waits, default=0)

    def teardown(self) -> None:
        """Once no guard is left, time alone brings the decision to a final state."""
        if not hasattr(self, "lifecycle"):
            return
        self.apply_event(GuardsChecked(self.now, (), verdict_stops=True))
        for _ in range(5):
            self.now += timedelta(days=1)
            self.apply_event(WindowEnded(self.now, self.now))
            self.apply_event(TimePassed(self.now))
        assert self.lifecycle.state in FINAL_STATES


TestLifecycle = LifecycleMachine.TestCase
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
