"""Carries out one stop: does what its state machine says, remembers each step first, until it is done."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from evalstop_client.errors import RequestRefused, SchedulerAway
from evalstop_client.receivers.stop import events, instructions, state_machine
from evalstop_client.receivers.stop.action import Action, Job, NotMine, Present
from evalstop_client.receivers.stop.events import Event
from evalstop_client.receivers.stop.instructions import Instruction, Report
from evalstop_client.receivers.stop.journal import Memory, Remembered
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.report import Reports
from evalstop_client.receivers.stop.state_machine import Bounds, Phase, Stop
from evalstop_client.service import Accepted, Away

logger = logging.getLogger("evalstop_client.receivers")


@dataclass(frozen=True)
class Surroundings:
    """What all stops of a receiver share. `reports` makes a connection for each stop."""

    action: Action
    memory: Memory
    reports: Callable[[], Reports]
    bounds: Bounds
    metrics: Metrics
    clock: Callable[[], float] = time.time


class Pursuit:
    """One stop that is being carried out."""

    def __init__(self, remembered: Remembered, surroundings: Surroundings, changed: Callable[[Stop], None]) -> None:
        """`changed` is told each new state, from the thread that runs."""
        self._request = remembered.request
        self._stop = remembered.stop
        self._around = surroundings
        self._changed = changed
        self._hurry = threading.Event()
        self._end = threading.Event()
        self._wake = threading.Event()
        self._reports = surroundings.reports()

    def escalate(self) -> None:
        """Go at it harder."""
        self._hurry.set()
        self._wake.set()

    def leave(self) -> None:
        """Leave it as it stands, to be gone on with by the next receiver."""
        self._end.set()
        self._wake.set()

    def run(self) -> Stop:
        """Carry the stop out to its end, or until `leave`."""
        event: Event = events.Begun(self._around.clock())
        try:
            while not self._end.is_set():
                stop, instruction = state_machine.step(self._stop, event, self._around.bounds)
                self._keep(stop)
                if instruction is None:
                    break
                event = self._carry_out(instruction)
            return self._stop
        finally:
            self._reports.close()

    def _keep(self, stop: Stop) -> None:
        if stop == self._stop:
            return
        if stop.phase is not self._stop.phase:
            logger.info("run %s (decision %s): %s", self._request.run_name, self._request.decision_id, stop.phase)
        self._stop = stop
        while True:
            try:
                self._around.memory.keep(self._request, stop)
                break
            except OSError as error:  # a full disk must not end the stop of a job, nor let it go on unremembered
                logger.error("cannot remember how far a stop has come, trying again: %s", error)
                if self._end.wait(1.0):
                    return
        self._changed(stop)

    def _carry_out(self, instruction: Instruction) -> Event:
        match instruction:
            case instructions.Wait(seconds):
                return self._wait(seconds)
            case instructions.Tell(report):
                return self._tell(report)
        try:
            return self._act(instruction)
        except RequestRefused as error:
            logger.error("run %s: %s", self._request.run_name, error.detail or error)
            return events.Refused(self._around.clock(), error.detail or str(error))
        except SchedulerAway as error:
            return self._away(error.detail or str(error))
        except Exception as error:  # the service must learn of it, whatever it is
            if self._stop.away == 0:
                logger.exception("the action failed")
            return self._away(f"{type(error).__name__}: {error}")

    def _act(self, instruction: Instruction) -> Event:
        action, clock = self._around.action, self._around.clock
        match instruction:
            case instructions.Find():
                job = action.find(self._request)
                return events.Foreign(clock()) if isinstance(job, NotMine) else self._found(job)
            case instructions.AskToSave(job):
                mark = self._reports.newest_checkpoint(self._request)
                return events.Asked(clock(), action.ask_to_save(job, self._request), mark)
            case instructions.Cancel(job):
                action.cancel(job, self._request)
                return events.Cancelled(clock())
            case instructions.Force(job):
                action.force(job)
                return events.Forced(clock())
            case instructions.Look(job, mark):
                seen = action.look(job)
                return events.Seen(clock(), seen, None if mark is None else self._saved_since(mark))
        raise AssertionError(instruction)

    def _found(self, job: Job) -> Event:
        seen = self._around.action.look(job)
        if isinstance(seen, Present):  # beside the stop, which waits for no service
            threading.Thread(target=self._acknowledge, args=(job,), name="acknowledge", daemon=True).start()
        return events.Found(self._around.clock(), job, seen)

    def _acknowledge(self, job: Job) -> None:
        reports = self._around.reports()  # a connection belongs to one thread
        try:
            report = Report("acknowledged", "the job is found, its end is under way", {**job.facts, "job": job.id})
            reports.acknowledge(self._request, report, self._around.bounds.checkpoint_seconds)
        finally:
            reports.close()

    def _saved_since(self, mark: str) -> bool | None:
        newest = self._reports.newest_checkpoint(self._request)
        return None if newest is None else newest > mark

    def _away(self, reason: str) -> Event:
        if self._stop.away == 0:
            logger.warning("run %s: %s; trying on", self._request.run_name, reason)
        self._around.metrics.add("scheduler_away_total")
        return events.Away(self._around.clock(), reason)

    def _wait(self, seconds: float) -> Event:
        self._wake.wait(seconds)
        self._wake.clear()
        if self._hurry.is_set() and not self._stop.escalated:
            return events.Escalated(self._around.clock())
        return events.Waited(self._around.clock())

    def _tell(self, report: Report) -> Event:
        answer = self._reports.send(self._request, report)
        clock = self._around.clock
        if isinstance(answer, Accepted):
            self._around.metrics.add("reports_total", 'answer="accepted"')
            return events.Told(clock())
        if isinstance(answer, Away):
            self._around.metrics.add("reports_total", 'answer="away"')
            return events.Untold(clock(), answer.asked_seconds)
        self._around.metrics.add("reports_total", 'answer="refused"')
        return events.Told(clock(), refusal=answer.reason)


def result_of(stop: Stop) -> str:
    """What became of a stop, in a word: foreign, confirmed, failed, abandoned; or under way."""
    if stop.phase is not Phase.DONE:
        return "under way"
    if not stop.mine:
        return "foreign"
    return stop.report.state if stop.report is not None else "abandoned"
