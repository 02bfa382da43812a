"""The state machine of a stop: fixed sequences of events, and a stateful test that kills it at any moment."""

from __future__ import annotations

from typing import Any

import pytest
from evalstop_client.receivers.stop import state_machine as machine
from evalstop_client.receivers.stop.job_control import Gone, Job, Parked, Present, Unproven
from evalstop_client.receivers.stop.state_machine import (
    Event,
    Happening,
    Instruction,
    JobAction,
    Phase,
    Report,
    Stop,
    StopTimeouts,
    Wait,
    step,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

JOB = Job("7", {"user": "ann"})
RUNNING, GONE = Present("RUNNING"), Gone("CANCELLED", {"exit_code": 0})
BOUNDS = StopTimeouts(
    checkpoint_seconds=100, cancel_seconds=30, give_up_seconds=200, abandon_seconds=5_000, report_seconds=1_000
)


def run_events(stop: Stop, *occurred: tuple[float, Event]) -> tuple[Stop, list[Instruction | None]]:
    """The stop after these events, each with its time, and the instruction that each gave."""
    given: list[Instruction | None] = []
    for at, event in occurred:
        stop, instruction = step(stop, event, at, BOUNDS)
        given.append(instruction)
    return stop, given


def list_kinds(given: list[Instruction | None]) -> list[str]:
    """The names of actions, and the class names of other instructions."""
    return [getattr(instruction, "name", type(instruction).__name__) for instruction in given]


def test_usual_stop() -> None:
    """The usual stop requests a checkpoint, waits for it, cancels the job, checks that it is gone, and reports."""
    stop, given = run_events(
        Stop(started_at=0),
        (0, Happening.CONTINUED),
        (1, machine.JobFound(JOB, RUNNING)),
        (2, machine.CheckpointRequested(True, "mark")),
        (3, Happening.CONTINUED),
        (3, machine.JobChecked(RUNNING, False)),
        (4, Happening.CONTINUED),
        (4, machine.JobChecked(RUNNING, True)),
        (5, Happening.CANCELLED),
        (6, Happening.CONTINUED),
        (6, machine.JobChecked(Present("COMPLETING"))),
        (7, Happening.CONTINUED),
        (7, machine.JobChecked(GONE)),
        (8, Happening.REPORTED),
    )
    kinds = list_kinds(given)
    assert kinds == [
        "FIND", "REQUEST_CHECKPOINT", "Wait", "CHECK", "Wait", "CHECK",
        "CANCEL", "Wait", "CHECK", "Wait", "CHECK", "Report", "NoneType",
    ]  # fmt: skip
    assert stop.phase is Phase.DONE
    assert stop.report is not None
    assert stop.report.details.items() >= {
        "job": "7", "user": "ann", "state": "CANCELLED", "how": "cancelled", "checkpoint": "saved", "seconds": 7
    }.items()  # fmt: skip


def test_job_that_starts_again_is_cancelled_again() -> None:
    """A requeue that the signal provoked ends the wait for the checkpoint, and one after the cancel is cancelled."""
    requeued = Present("PENDING", again=True)
    stop, given = run_events(
        Stop(started_at=0),
        (0, machine.JobFound(JOB, RUNNING)),
        (0, machine.CheckpointRequested(True, "mark")),
        (1, machine.JobChecked(requeued, False)),
        (1, Happening.CANCELLED),
        (2, machine.JobChecked(Present("COMPLETING"))),
        (3, machine.JobChecked(requeued)),
        (4, Happening.CANCELLED),
        (5, machine.JobChecked(GONE)),
    )
    assert list_kinds(given) == [
        "REQUEST_CHECKPOINT", "Wait", "CANCEL", "Wait", "Wait", "CANCEL", "Wait", "Report"
    ]  # fmt: skip
    assert (stop.cancelled_at, stop.checkpoint) == (1, "not seen")
    parked, given = run_events(
        Stop(started_at=0, parks=True, phase=Phase.CANCELLING, job=JOB, cancelled_at=1),
        (2, machine.JobChecked(requeued)),
    )
    assert list_kinds(given) == ["PARK"]
    _, given = run_events(parked, (2, Happening.TAKEN_BACK), (3, machine.JobChecked(requeued)))
    assert list_kinds(given) == ["CHECK", "Wait"]


def test_job_of_which_nothing_is_known_is_not_confirmed() -> None:
    """A scheduler that forgot the job, or that gave it up for lost, proves nothing: the stop failed."""
    for event in ((0, machine.JobFound(JOB, Unproven("lost"))), (1, machine.JobChecked(Unproven("lost")))):
        stop, given = run_events(Stop(started_at=0, phase=Phase.CANCELLING, job=JOB, cancelled_at=0), event)
        assert list_kinds(given) == ["Report"]
        assert stop.report is not None
        assert (stop.report.state, stop.report.reason) == ("failed", "lost")


def test_unseen_checkpoint_is_awaited_until_its_timeout() -> None:
    """The job is cancelled when the checkpoint window ends, not before, and the report says that none was seen."""
    stop, _ = run_events(
        Stop(started_at=0), (0, machine.JobFound(JOB, RUNNING)), (0, machine.CheckpointRequested(True, None))
    )
    _, (early,) = run_events(stop, (99.9, machine.JobChecked(RUNNING, None)))
    assert early == Wait(1.0)
    late, (instruction,) = run_events(stop, (100, machine.JobChecked(RUNNING, None)))
    assert (instruction, late.checkpoint) == (JobAction.CANCEL, "not seen in time")


def test_job_without_checkpoint_signal_is_cancelled_at_once() -> None:
    """A job that cannot be asked for a checkpoint gets no window."""
    _, given = run_events(
        Stop(started_at=0), (0, machine.JobFound(JOB, RUNNING)), (0, machine.CheckpointRequested(False))
    )
    assert given[-1] == JobAction.CANCEL


def test_job_that_cannot_be_asked_in_time_is_cancelled() -> None:
    """A scheduler that keeps failing to ask for a checkpoint delays the cancel by the checkpoint window only."""
    stop, given = run_events(
        Stop(started_at=0),
        (5, machine.JobFound(JOB, RUNNING)),
        (104.9, machine.SchedulerFailed("scancel does not answer")),
        (104.9, Happening.CONTINUED),
        (105, machine.SchedulerFailed("scancel does not answer")),
    )
    assert list_kinds(given) == ["REQUEST_CHECKPOINT", "Wait", "REQUEST_CHECKPOINT", "CANCEL"]
    assert stop.checkpoint == "could not be asked for"


def test_surviving_job_is_killed_repeatedly_and_reported_once() -> None:
    """A job that survives is killed after each grace period, reported as failed once, and confirmed when it ends."""
    stop = Stop(started_at=0, phase=Phase.CANCELLING, job=JOB, cancelled_at=0)
    stop, given = run_events(
        stop,
        (29, machine.JobChecked(RUNNING)),
        (30, machine.JobChecked(RUNNING)),
        (30, Happening.KILLED),
        (61, machine.JobChecked(RUNNING)),
    )
    assert list_kinds(given) == ["Wait", "KILL", "Wait", "KILL"]
    stop, given = run_events(
        stop, (190, Happening.KILLED), (200, machine.JobChecked(RUNNING)), (201, Happening.REPORTED)
    )
    assert isinstance(given[1], Report)
    assert given[1].state == "failed"
    assert isinstance(given[2], Wait), "the job is no longer checked"
    stop, given = run_events(
        stop,
        (210, machine.JobChecked(RUNNING)),
        (211, machine.JobChecked(GONE)),
        (212, Happening.REPORTED),
    )
    assert list_kinds(given) == ["Wait", "Report", "NoneType"]
    assert stop.report is not None
    assert (stop.report.state, stop.report.details["how"]) == ("confirmed", "forced")


def test_stop_is_abandoned_after_its_last_timeout() -> None:
    """After abandon_seconds a stop whose failure was reported ends without confirmation."""
    stop = Stop(started_at=0, phase=Phase.FORCING, job=JOB, cancelled_at=0, killed_at=4_999, failure_reported=True)
    stop, given = run_events(stop, (5_000, machine.JobChecked(RUNNING)))
    assert (stop.phase, given) == (Phase.DONE, [None])


def test_report_is_retried_until_its_timeout() -> None:
    """A report is retried at growing intervals, not sooner than the service asks, until report_seconds."""
    stop, given = run_events(
        Stop(started_at=0),
        (0, machine.JobFound(JOB, GONE)),
        (1, machine.ReportFailed()),
        (2, Happening.CONTINUED),
    )
    assert list_kinds(given) == ["Report", "Wait", "Report"]
    _, (wait,) = run_events(stop, (3, machine.ReportFailed(retry_after_seconds=77)))
    assert wait == Wait(77)
    late, given = run_events(stop, (1_000, machine.ReportFailed()))
    assert (late.phase, late.report_answered, given) == (Phase.DONE, False, [None])


def test_failure_is_reported_at_growing_intervals_while_the_job_is_checked() -> None:
    """While the service is away, the job is checked as often as before, and the report is tried ever less often."""
    stop = Stop(started_at=0, phase=Phase.CANCELLING, job=JOB, cancelled_at=0, parks=True)
    tried_at = []
    for second in range(200, 400):
        stop, instruction = step(stop, machine.JobChecked(RUNNING), second, BOUNDS)
        if isinstance(instruction, Report):
            tried_at.append(second)
            stop, instruction = step(stop, machine.ReportFailed(chance=0.999), second, BOUNDS)
        assert instruction == Wait(BOUNDS.poll_seconds)
    assert tried_at == [200, 201, 202, 204, 208, 216, 232, 262, 292, 322, 352, 382]


def test_reports_of_many_receivers_are_spread() -> None:
    """After the same failures, receivers wait for up to twice as long as others."""
    stop, _ = run_events(Stop(started_at=0), (0, machine.JobFound(JOB, GONE)), (1, machine.ReportFailed()))
    due_at = [run_events(stop, (2, machine.ReportFailed(chance=chance)))[0].report_due_at for chance in (0.0, 0.999)]
    assert due_at == [pytest.approx(2.5), pytest.approx(3.0, abs=0.01)]


def test_stop_that_is_taken_back_after_the_cancel_ends_without_a_kill() -> None:
    """Neither an escalation nor the end of the grace period kills the job; it is awaited for the time of a cancel."""
    stop = Stop(started_at=0, phase=Phase.CANCELLING, job=JOB, cancelled_at=0)
    stop, given = run_events(
        stop,
        (20, Happening.TAKEN_BACK),
        (21, Happening.ESCALATED),
        (49, machine.JobChecked(RUNNING)),
        (50, machine.SchedulerFailed("away")),
    )
    assert list_kinds(given) == ["CHECK", "CHECK", "Wait", "NoneType"]
    assert stop.phase is Phase.DONE


def test_stop_that_is_taken_back_before_its_cancel_succeeded_does_not_cancel() -> None:
    """A cancel that the scheduler did not answer is not repeated; a job that has ended all the same is reported."""
    stop = Stop(started_at=0, phase=Phase.CANCELLING, job=JOB)
    stop, given = run_events(
        stop,
        (1, machine.SchedulerFailed("away")),
        (2, Happening.TAKEN_BACK),
        (3, Happening.CONTINUED),
        (3, machine.JobChecked(GONE)),
    )
    assert list_kinds(given) == ["Wait", "CHECK", "CHECK", "Report"]


def test_escalation_keeps_the_checkpoint_window() -> None:
    """An escalation kills the job sooner after the cancel, but does not shorten the checkpoint window."""
    stop, _ = run_events(
        Stop(started_at=0), (0, machine.JobFound(JOB, RUNNING)), (0, machine.CheckpointRequested(True, ""))
    )
    stop, given = run_events(
        stop,
        (1, Happening.ESCALATED),
        (1, machine.JobChecked(RUNNING, False)),
        (2, machine.JobChecked(RUNNING, True)),
    )
    assert list_kinds(given) == ["CHECK", "Wait", "CANCEL"]
    _, given = run_events(stop, (3, Happening.CANCELLED), (4, machine.JobChecked(RUNNING)))
    assert given[-1] == JobAction.KILL


class StopMachine(RuleBasedStateMachine):
    """A receiver that may be killed at any moment, with a scheduler and a service that may be unavailable."""

    @initialize(
        ends_on=st.sampled_from(["ask", "cancel", "kill", "kill twice"]), can_ask=st.booleans(), parks=st.booleans()
    )
    def begin(self, ends_on: str, can_ask: bool, parks: bool) -> None:
        self.now = 0.0
        self.ends_on, self.can_ask = ends_on, can_ask
        self.job_gone = False
        self.saved = False
        self.asked_at: float | None = None
        self.found_at = 0.0
        self.asking_failed = False
        self.cancelled_at: float | None = None
        self.kills = 0
        self.reports: list[Report] = []
        self.escalated = False
        self.parks = parks
        self.stop = Stop(started_at=0.0, parks=parks)
        self.instruction: Instruction | None = None
        self._handle(Happening.CONTINUED)

    def _handle(self, event: Event) -> None:
        self.stop, self.instruction = step(self.stop, event, self.now, BOUNDS)

    @precondition(lambda self: self.instruction is not None)
    @rule(pause=st.floats(0, 40))
    def carry_out(self, pause: float) -> None:
        """The instruction is carried out, and its result is handled."""
        self._handle(self._carry_out(pause))

    @precondition(lambda self: self.instruction is not None)
    @rule(pause=st.floats(0, 40))
    def restart_before_the_result(self, pause: float) -> None:
        """The instruction is carried out, and the receiver is killed before it handles the result."""
        self._carry_out(pause)
        self._handle(Happening.CONTINUED)

    @rule(seconds=st.floats(0, 300))
    def restart_after_a_while(self, seconds: float) -> None:
        """The receiver is killed before the instruction, and only the stored stop survives."""
        self.now += seconds
        self._handle(Happening.CONTINUED)

    @precondition(lambda self: isinstance(self.instruction, JobAction))
    @rule(seconds=st.floats(0, 60))
    def fail_the_scheduler(self, seconds: float) -> None:
        self.now += seconds
        self.asking_failed |= self.instruction is JobAction.REQUEST_CHECKPOINT
        self._handle(machine.SchedulerFailed("away"))

    @precondition(lambda self: isinstance(self.instruction, Report))
    @rule(seconds=st.floats(0, 30))
    def fail_the_report(self, seconds: float) -> None:
        self.now += seconds
        self._handle(machine.ReportFailed())

    @precondition(lambda self: isinstance(self.instruction, Wait))
    @rule()
    def escalate(self) -> None:
        self.escalated = True
        self._handle(Happening.ESCALATED)

    @rule()
    def end_the_job(self) -> None:
        self.job_gone = True

    @rule()
    def save_a_checkpoint(self) -> None:
        self.saved = self.asked_at is not None

    def _carry_out(self, pause: float) -> Event:
        self.now += pause
        state: Any = GONE if self.job_gone else RUNNING
        match self.instruction:
            case JobAction.FIND:
                self.found_at = self.now
                return machine.JobFound(JOB, state)
            case JobAction.REQUEST_CHECKPOINT:
                if not self.can_ask:
                    return machine.CheckpointRequested(False)
                self.asked_at = self.now
                self.job_gone |= self.ends_on == "ask"
                return machine.CheckpointRequested(True, "mark")
            case JobAction.CANCEL | JobAction.PARK:
                assert (self.instruction is JobAction.PARK) == self.parks
                window_begins = self.found_at if self.asking_failed else self.asked_at
                window_over = window_begins is not None and self.now - window_begins >= BOUNDS.checkpoint_seconds
                assert window_over or self.saved or not self.can_ask, "cancelled before the checkpoint was saved"
                self.cancelled_at = self.now
                self.job_gone |= self.ends_on == "cancel" or self.parks
                return Happening.CANCELLED
            case JobAction.KILL:
                assert not self.parks, "a parked job was killed"
                assert self.cancelled_at is not None, "killed without a cancel"
                assert self.escalated or self.now - self.cancelled_at >= BOUNDS.cancel_seconds, (
                    "killed within the grace period"
                )
                self.kills += 1
                self.job_gone |= self.ends_on == "kill" or self.kills > 1
                return Happening.KILLED
            case JobAction.CHECK:
                if self.parks and self.job_gone and self.cancelled_at is not None:
                    state = Parked("HELD")
                return machine.JobChecked(state, self.saved)
            case Wait():
                return Happening.CONTINUED
            case Report() as report:
                assert report.state == "failed" or self.job_gone, "confirmed a job that is not gone"
                self.reports.append(report)
                return Happening.REPORTED
        raise AssertionError(self.instruction)

    @invariant()
    def has_no_instruction_once_finished(self) -> None:
        if getattr(self, "stop", None) is not None and self.stop.phase is Phase.DONE:
            assert self.instruction is None

    def teardown(self) -> None:
        """Without further failures, and with a job that ends when killed, every stop finishes and is reported."""
        if getattr(self, "stop", None) is None:
            return
        for _ in range(500):
            if self.instruction is None:
                break
            pause = self.instruction.seconds if isinstance(self.instruction, Wait) else 0.1
            self._handle(self._carry_out(pause))
        assert self.stop.phase is Phase.DONE
        if self.now < BOUNDS.report_seconds:
            assert self.reports[-1].state == ("parked" if self.parks and self.cancelled_at is not None else "confirmed")


StopMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestStopMachine = StopMachine.TestCase
