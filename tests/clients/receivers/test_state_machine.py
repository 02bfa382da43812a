"""The life of a stop: told as a story by plain calls, and held to its laws while it is killed at any moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalstop_client.receivers.stop import events, instructions
from evalstop_client.receivers.stop.events import Event
from evalstop_client.receivers.stop.instructions import Instruction
from evalstop_client.receivers.stop.job_control import Gone, Job, Parked, Present
from evalstop_client.receivers.stop.state_machine import Phase, Stop, StopTimeouts, step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

JOB = Job("7", {"user": "ann"})
RUNNING, GONE = Present("RUNNING"), Gone("CANCELLED", {"exit_code": 0})
BOUNDS = StopTimeouts(
    checkpoint_seconds=100, cancel_seconds=30, give_up_seconds=200, abandon_seconds=5_000, report_seconds=1_000
)


def told(stop: Stop, *happened: Event, bounds: StopTimeouts = BOUNDS) -> tuple[Stop, list[Instruction | None]]:
    """What comes of these events, one after the other."""
    done = []
    for event in happened:
        stop, instruction = step(stop, event, bounds)
        done.append(instruction)
    return stop, done


def test_usual_stop_saves_cancels_and_tells() -> None:
    """JobFound, asked for a checkpoint, saved, cancelled, seen to be gone, told."""
    stop, done = told(
        Stop(started_at=0),
        events.Started(0),
        events.JobFound(1, JOB, RUNNING),
        events.CheckpointRequested(2, True, "mark"),
        events.WaitEnded(3),
        events.JobChecked(3, RUNNING, False),
        events.WaitEnded(4),
        events.JobChecked(4, RUNNING, True),
        events.JobCancelled(5),
        events.WaitEnded(6),
        events.JobChecked(6, Present("COMPLETING")),
        events.WaitEnded(7),
        events.JobChecked(7, GONE),
        events.ReportAccepted(8),
    )
    kinds = [type(one).__name__ for one in done]
    assert kinds == [
        "FindJob", "RequestCheckpoint", "Wait", "CheckJob", "Wait", "CheckJob",
        "CancelJob", "Wait", "CheckJob", "Wait", "CheckJob", "SendReport", "NoneType",
    ]  # fmt: skip
    assert stop.phase is Phase.DONE
    assert stop.report is not None
    assert stop.report.details.items() >= {
        "job": "7", "user": "ann", "state": "CANCELLED", "how": "cancelled", "checkpoint": "saved", "seconds": 7
    }.items()  # fmt: skip


def test_checkpoint_that_is_not_seen_is_waited_for_to_the_end_of_its_time() -> None:
    """The window closes at its end, not before, and the report says that nobody saw a checkpoint."""
    stop, _ = told(Stop(started_at=0), events.JobFound(0, JOB, RUNNING), events.CheckpointRequested(0, True, None))
    _, (early,) = told(stop, events.JobChecked(99.9, RUNNING, None))
    assert early == instructions.Wait(1.0)
    late, (instruction,) = told(stop, events.JobChecked(100, RUNNING, None))
    assert (instruction, late.checkpoint) == (instructions.CancelJob(JOB), "not seen in time")


def test_job_that_cannot_be_asked_is_cancelled_at_once() -> None:
    """No window is held open for a checkpoint that nobody was asked for."""
    _, done = told(Stop(started_at=0), events.JobFound(0, JOB, RUNNING), events.CheckpointRequested(0, False))
    assert done[-1] == instructions.CancelJob(JOB)


def test_no_window_means_no_signal() -> None:
    """With a window of 0 the job is cancelled right away."""
    _, done = told(Stop(started_at=0), events.JobFound(0, JOB, RUNNING), bounds=replace(BOUNDS, checkpoint_seconds=0))
    assert done == [instructions.CancelJob(JOB)]


def test_deaf_job_is_forced_again_and_again_and_told_once() -> None:
    """After its grace a job is forced, forced again, told as failed once, and told as ended when it ends."""
    stop = Stop(started_at=0, phase=Phase.CANCELLING, job=JOB, cancelled_at=0)
    stop, done = told(
        stop,
        events.JobChecked(29, RUNNING),
        events.JobChecked(30, RUNNING),
        events.JobKilled(30),
        events.JobChecked(61, RUNNING),
    )
    assert [type(one).__name__ for one in done] == ["Wait", "KillJob", "Wait", "KillJob"]
    stop, done = told(stop, events.JobKilled(190), events.JobChecked(200, RUNNING), events.ReportAccepted(201))
    assert isinstance(done[1], instructions.SendReport)
    assert done[1].report.state == "failed"
    assert isinstance(done[2], instructions.Wait), "it is watched on"
    stop, done = told(stop, events.JobChecked(210, RUNNING), events.JobChecked(211, GONE), events.ReportAccepted(212))
    assert [type(one).__name__ for one in done] == ["Wait", "SendReport", "NoneType"]
    assert stop.report is not None
    assert (stop.report.state, stop.report.details["how"]) == ("confirmed", "forced")


def test_job_that_stays_for_ever_is_let_be_one_day() -> None:
    """After its very last day a stop ends without a confirmation, having been told as failed."""
    stop = Stop(started_at=0, phase=Phase.FORCING, job=JOB, cancelled_at=0, forced_at=4_999, failure_reported=True)
    stop, done = told(stop, events.JobChecked(5_000, RUNNING))
    assert (stop.phase, done) == (Phase.DONE, [None])


def test_report_is_told_until_its_time_is_over() -> None:
    """A service that does not answer is tried at growing intervals, at least as long apart as it asks for."""
    stop, done = told(Stop(started_at=0), events.JobFound(0, JOB, GONE), events.ReportFailed(1), events.WaitEnded(2))
    assert [type(one).__name__ for one in done] == ["SendReport", "Wait", "SendReport"]
    _, (wait,) = told(stop, events.ReportFailed(3, retry_after_seconds=77))
    assert wait == instructions.Wait(77)
    late, done = told(stop, events.ReportFailed(1_000))
    assert (late.phase, late.told, done) == (Phase.DONE, False, [None])


def test_refusal_is_told_and_ends_it() -> None:
    """What the job_control refuses is told as failed, and nothing is done."""
    stop, done = told(
        Stop(started_at=0), events.Started(0), events.JobRefused(1, "not allowed"), events.ReportAccepted(2)
    )
    assert [type(one).__name__ for one in done] == ["FindJob", "SendReport", "NoneType"]
    assert stop.report is not None
    assert (stop.report.state, stop.report.reason) == ("failed", "not allowed")


def test_escalation_does_not_cut_the_time_for_the_checkpoint() -> None:
    """Harder means to force sooner, not to lose the checkpoint."""
    stop, _ = told(Stop(started_at=0), events.JobFound(0, JOB, RUNNING), events.CheckpointRequested(0, True, ""))
    stop, done = told(
        stop, events.StopEscalated(1), events.JobChecked(1, RUNNING, False), events.JobChecked(2, RUNNING, True)
    )
    assert [type(one).__name__ for one in done] == ["CheckJob", "Wait", "CancelJob"]
    _, done = told(stop, events.JobCancelled(3), events.JobChecked(4, RUNNING))
    assert done[-1] == instructions.KillJob(JOB)


class Receiver(RuleBasedStateMachine):
    """A receiver that may be killed at any moment, a scheduler and a service that may be away, a job as it likes."""

    @initialize(
        ends_on=st.sampled_from(["ask", "cancel", "force", "force twice"]), asks=st.booleans(), parks=st.booleans()
    )
    def begin(self, ends_on: str, asks: bool, parks: bool) -> None:
        self.now = 0.0
        self.ends_on, self.can_ask = ends_on, asks
        self.job_gone = False
        self.saved = False
        self.asked_at: float | None = None
        self.cancelled_at: float | None = None
        self.forced = 0
        self.reports: list[instructions.Report] = []
        self.escalated = False
        self.parks = parks
        self.kept = Stop(started_at=0.0, parks=parks)
        self.instruction: Instruction | None = None
        self._hand(events.Started(self.now))

    def _hand(self, event: Event) -> None:
        self.kept, self.instruction = step(self.kept, event, BOUNDS)

    @precondition(lambda self: self.instruction is not None)
    @rule(pause=st.floats(0, 40))
    def carry_out(self, pause: float) -> None:
        """The instruction is carried out, and its end is heard of."""
        self._hand(self._done(pause))

    @precondition(lambda self: self.instruction is not None)
    @rule(pause=st.floats(0, 40))
    def be_killed_after_doing(self, pause: float) -> None:
        """The instruction was carried out, and the receiver killed before it heard so."""
        self._done(pause)
        self._hand(events.Started(self.now))

    @rule(seconds=st.floats(0, 300))
    def be_killed_and_started_later(self, seconds: float) -> None:
        """Nothing but what was kept survives."""
        self.now += seconds
        self._hand(events.Started(self.now))

    @precondition(
        lambda self: isinstance(
            self.instruction,
            instructions.FindJob
            | instructions.CheckJob
            | instructions.CancelJob
            | instructions.ParkJob
            | instructions.KillJob,
        )
    )
    @rule(seconds=st.floats(0, 60))
    def find_the_scheduler_away(self, seconds: float) -> None:
        self.now += seconds
        self._hand(events.SchedulerFailed(self.now, "away"))

    @precondition(lambda self: isinstance(self.instruction, instructions.SendReport))
    @rule(seconds=st.floats(0, 30))
    def find_the_service_away(self, seconds: float) -> None:
        self.now += seconds
        self._hand(events.ReportFailed(self.now))

    @precondition(lambda self: isinstance(self.instruction, instructions.Wait))
    @rule()
    def be_hurried(self) -> None:
        self.escalated = True
        self._hand(events.StopEscalated(self.now))

    @rule()
    def end_by_itself(self) -> None:
        self.job_gone = True

    @rule()
    def save(self) -> None:
        self.saved = self.asked_at is not None

    def _done(self, pause: float) -> Event:
        self.now += pause
        seen: Any = GONE if self.job_gone else RUNNING
        match self.instruction:
            case instructions.FindJob():
                return events.JobFound(self.now, JOB, seen)
            case instructions.RequestCheckpoint():
                if not self.can_ask:
                    return events.CheckpointRequested(self.now, False)
                self.asked_at = self.now
                self.job_gone |= self.ends_on == "ask"
                return events.CheckpointRequested(self.now, True, "mark")
            case instructions.CancelJob() | instructions.ParkJob():
                assert isinstance(self.instruction, instructions.ParkJob) == self.parks
                window_over = self.asked_at is not None and self.now - self.asked_at >= BOUNDS.checkpoint_seconds
                assert window_over or self.saved or not self.can_ask, "cancelled before the checkpoint was safe"
                self.cancelled_at = self.now
                self.job_gone |= self.ends_on == "cancel" or self.parks
                return events.JobCancelled(self.now)
            case instructions.KillJob():
                assert not self.parks, "nobody is parked by force"
                assert self.cancelled_at is not None, "forced without a cancel"
                assert self.escalated or self.now - self.cancelled_at >= BOUNDS.cancel_seconds, "forced too soon"
                self.forced += 1
                self.job_gone |= self.ends_on == "force" or self.forced > 1
                return events.JobKilled(self.now)
            case instructions.CheckJob():
                if self.parks and self.job_gone and self.cancelled_at is not None:
                    seen = Parked("HELD")
                return events.JobChecked(self.now, seen, self.saved)
            case instructions.Wait():
                return events.WaitEnded(self.now)
            case instructions.SendReport(report):
                assert report.state == "failed" or self.job_gone, "confirmed what is not gone"
                self.reports.append(report)
                return events.ReportAccepted(self.now)
        raise AssertionError(self.instruction)

    @invariant()
    def done_is_done(self) -> None:
        if getattr(self, "kept", None) is not None and self.kept.phase is Phase.DONE:
            assert self.instruction is None

    def teardown(self) -> None:
        """Left in peace, with a job that goes when forced, every stop ends told or, after its last day, let be."""
        if getattr(self, "kept", None) is None:
            return
        for _ in range(500):
            if self.instruction is None:
                break
            pause = self.instruction.seconds if isinstance(self.instruction, instructions.Wait) else 0.1
            self._hand(self._done(pause))
        assert self.kept.phase is Phase.DONE
        if self.now < BOUNDS.report_seconds:
            assert self.reports[-1].state == ("parked" if self.parks and self.cancelled_at is not None else "confirmed")


Receiver.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestReceiver = Receiver.TestCase
